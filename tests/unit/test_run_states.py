"""The state tables: every legal and illegal pair, stale tokens, terminal states, what becomes of a lost attempt."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db import Database
from app.models import Attempt, Base, Run, Transition, utc_now
from app.runs import states


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    db = Database(f"sqlite:///{tmp_path_factory.mktemp('states') / 'states.db'}")
    Base.metadata.create_all(db.engine)
    yield db
    db.dispose()


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    """Empty tables: what a test wrote is taken back."""
    with database.write() as session:
        yield session
        session.rollback()


def make_run(session: Session, state: str, **fields: object) -> Run:
    values: dict[str, object] = {"number": 1, "name": "r", "config_hash": "0", "tags": [], "sparkline": []}
    values |= {"config": {}, "reward_sources": {}, "needs": {}}
    run = Run(id=uuid.uuid4(), state=state, **(values | fields))
    session.add(run)
    session.flush()
    return run


def make_attempt(session: Session, run: Run, state: str = "running", number: int = 1, token: str = "t1") -> Attempt:
    attempt = Attempt(id=uuid.uuid4(), run_id=run.id, number=number, token=token, state=state, devices=[], beats=7)
    session.add(attempt)
    run.num_attempts = number
    session.flush()
    return attempt


PAIRS = [(source, target) for source in sorted(states.RUN_STATES) for target in sorted(states.RUN_STATES)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_run_moves_exactly_along_the_table(session: Session, source: str, target: str) -> None:
    run = make_run(session, source, version=5)

    moved = states.transition(session, run.id, target, actor="ann", reason="why", message="because")

    session.refresh(run)
    rows = session.scalars(select(Transition)).all()
    assert moved == (target in states.TRANSITIONS[source])
    if moved:
        assert (run.state, run.reason, run.message, run.version) == (target, "why", "because", 6)
        assert [(row.source, row.target, row.actor) for row in rows] == [(source, target, "ann")]
    else:
        assert (run.state, run.reason, run.version, list(rows)) == (source, None, 5, [])


LEGAL = """queued>starting queued>paused queued>cancelled starting>running starting>queued starting>pausing
starting>cancelling starting>completed starting>failed running>queued running>pausing running>cancelling
running>completed running>failed pausing>paused pausing>cancelling pausing>completed pausing>failed
paused>queued paused>cancelled cancelling>cancelled cancelling>completed"""


def test_the_legal_pairs_are_these() -> None:
    legal = {f"{source}>{target}" for source, target in PAIRS if target in states.TRANSITIONS[source]}

    assert legal == set(LEGAL.split())
    assert frozenset({"completed", "failed", "cancelled"}) == states.TERMINAL_STATES


ATTEMPT_PAIRS = [(a, b) for a in sorted(states.ATTEMPT_TRANSITIONS) for b in sorted(states.ATTEMPT_TRANSITIONS)]


@pytest.mark.parametrize(("source", "target"), ATTEMPT_PAIRS)
def test_an_attempt_moves_exactly_along_its_table(session: Session, source: str, target: str) -> None:
    attempt = make_attempt(session, make_run(session, "running"), source)

    moved = states.move_attempt(session, attempt.id, target, token="t1")

    session.refresh(attempt)
    assert moved == (target in states.ATTEMPT_TRANSITIONS[source])
    assert attempt.state == (target if moved else source)
    assert (attempt.ended_at is not None) == (moved and target not in states.ACTIVE_ATTEMPT_STATES)


def test_a_stale_token_changes_nothing(session: Session) -> None:
    run = make_run(session, "running")
    old = make_attempt(session, run, "lost", 1, "t1")
    make_attempt(session, run, "running", 2, "t2")

    assert not states.transition(session, run.id, "completed", actor="worker:a", token="t1")
    assert not states.move_attempt(session, old.id, "finished", token="t1")
    assert states.transition(session, run.id, "completed", actor="worker:b", token="t2")


def test_the_newest_attempts_token_is_stale_once_the_attempt_is_lost(session: Session) -> None:
    run = make_run(session, "running")
    attempt = make_attempt(session, run)
    assert states.lose_attempt(session, attempt.id, actor="reaper", message="silent") == "queued"

    assert not states.transition(session, run.id, "paused", actor="worker:a", token="t1")
    assert not states.transition(session, run.id, "cancelled", actor="worker:a", token="t1")
    assert run.state == "queued"


def test_sources_narrow_the_table(session: Session) -> None:
    run = make_run(session, "running")

    assert not states.transition(session, run.id, "queued", actor="ann", sources=("paused",))
    assert not states.transition(session, run.id, "paused", actor="ann", sources=("running",))


def test_an_unknown_run_changes_nothing(session: Session) -> None:
    assert not states.transition(session, uuid.uuid4(), "cancelled", actor="ann")


def test_a_late_beat_saves_an_attempt_from_being_lost(session: Session) -> None:
    attempt = make_attempt(session, make_run(session, "running"))

    assert states.lose_attempt(session, attempt.id, actor="reaper", message="silent", beats=6) is None
    assert attempt.state == "running"


LOST = [("starting", "queued"), ("running", "queued"), ("pausing", "paused"), ("cancelling", "cancelled")]


@pytest.mark.parametrize(("before", "after"), LOST)
def test_a_lost_attempt_decides_its_run(session: Session, before: str, after: str) -> None:
    run = make_run(session, before)
    attempt = make_attempt(session, run)

    assert states.lose_attempt(session, attempt.id, actor="reaper", message="silent", beats=7) == after
    assert (run.state, run.restarts) == (after, 1 if after == "queued" else 0)


def test_a_run_fails_when_its_restarts_are_used_up(session: Session) -> None:
    run = make_run(session, "running", restarts=2, max_restarts=2)
    attempt = make_attempt(session, run)

    assert states.lose_attempt(session, attempt.id, actor="reaper", message="silent") == "failed"
    assert (run.state, run.reason, run.restarts) == ("failed", "worker_lost", 2)
    assert run.message == "silent; 2 restarts are used up"
    assert run.ended_at is not None
    assert run.ended_at <= utc_now()


INTENTS = [
    ("request_cancel", {"queued": "cancelled", "paused": "cancelled", "starting": "cancelling",
                        "running": "cancelling", "pausing": "cancelling"}),
    ("request_pause", {"queued": "paused", "starting": "pausing", "running": "pausing"}),
    ("request_resume", {"paused": "queued"}),
]  # fmt: skip


@pytest.mark.parametrize(("intent", "expected"), INTENTS)
def test_an_operators_wish_moves_a_run_from_every_state_as_written(
    session: Session, intent: str, expected: dict[str, str]
) -> None:
    for number, state in enumerate(sorted(states.RUN_STATES), start=1):
        run = make_run(session, state, number=number)
        assert getattr(states, intent)(session, run.id, actor="ann") == expected.get(state)
        assert run.state == expected.get(state, state)
