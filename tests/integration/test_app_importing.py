from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.db import Database
from app.errors import Invalid
from app.metrics.service import series
from app.models import Run
from app.runs.service import get_run, import_run, list_attempts, list_transitions
from app.settings import Settings
from tests import seed


@pytest.fixture
def folder(seeded_home: Path, tmp_path: Path) -> Path:
    """What an engine wrote without the web, and failed."""
    return Path(shutil.copytree(attempts_of(seeded_home, "failed"), tmp_path / "outside"))


def attempts_of(seeded_home: Path, ending: str) -> Path:
    """The attempt whose journal ends with this event."""
    for journal in seeded_home.glob("runs/*/attempts/*/journal.jsonl"):
        if json.loads(journal.read_text().splitlines()[-1])["type"] == ending:
            return journal.parent
    raise AssertionError(ending)


def test_a_run_made_without_the_web_is_taken_in_whole(
    any_database: Database, any_settings: Settings, seeded_home: Path
) -> None:
    source = attempts_of(seeded_home, "finished")
    before = sorted(path.name for path in source.rglob("*"))
    run = import_run(any_settings, any_database, source)
    assert (run.state, run.reason, run.imported, run.num_attempts) == ("completed", "finished", True, 1)
    assert run.steps_done == seed.SFT_STEPS + seed.RL_STEPS
    assert run.git_commit == "c0ffee" + "0" * 34
    with any_database.read() as session:
        [points] = series(session, run, ["loss"], attempt=1)
        assert points.total == seed.RL_STEPS - seed.CHECKPOINT_EVERY
        assert [step.message for step in list_transitions(session, run)] == ["imported"]
    assert sorted(path.name for path in source.rglob("*")) == before


@pytest.mark.parametrize(
    ("ending", "state", "attempt"), [("failed", "failed", "failed"), ("trained", "failed", "lost")]
)
def test_the_journal_says_how_the_run_ended(
    database: Database, settings: Settings, seeded_home: Path, ending: str, state: str, attempt: str
) -> None:
    run = import_run(settings, database, attempts_of(seeded_home, ending))
    assert run.state == state
    assert run.message
    with database.read() as session:
        [view] = list_attempts(session, run)
        assert view.attempt.state == attempt


def refuse(settings: Settings, database: Database, folder: Path, word: str) -> None:
    with pytest.raises(Invalid) as refused:
        import_run(settings, database, folder)
    assert word in str(refused.value.problems[0])
    with database.read() as session:
        assert session.query(Run).count() == 0
    assert list(settings.home.glob("runs/*")) == []


def test_a_folder_that_is_none_is_refused_and_leaves_nothing(
    database: Database, settings: Settings, folder: Path
) -> None:
    refuse(settings, database, folder / "nothing", "cannot be read")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"seed":0', '"seed":1'))
    refuse(settings, database, folder, "not the one its journal was written with")
    (folder / "config.json").write_text(config)
    (folder / "journal.jsonl").write_text("not json\n")
    refuse(settings, database, folder, "cannot be read")
    (folder / "journal.jsonl").unlink()
    refuse(settings, database, folder, "begins with")


def test_the_same_folder_can_be_taken_in_twice(database: Database, settings: Settings, folder: Path) -> None:
    numbers = [import_run(settings, database, folder).number for _ in range(2)]
    with database.read() as session:
        assert [get_run(session, number).state for number in numbers] == ["failed", "failed"]
