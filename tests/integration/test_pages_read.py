"""Every page renders: seeded, empty, hostile; without inline script or style; with light HTML."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import select
from typer.core import TyperGroup
from typer.main import get_command

from app.cli.root import cli
from app.db import Database
from app.models import Attempt, JournalEvent, Run, utc_now
from app.runs.service import create_run
from app.settings import Settings
from app.users.service import ensure_first_user
from grpo_engine.config import RLStage
from grpo_engine.types import Group, Rollout
from tests import seed
from tests.callers import browser
from tests.seed_rollouts import NAN_STEP, make_groups

EMPTY_STATES = {
    "/runs": "cohort run start -f configs/demo.yaml --follow",
    "/configs": "press “Save a new version”",
    "/checkpoints": "Launch a run and they appear here",
    "/rewards": "cohort run start -f config.yaml --reward",
    "/workers": "cohort worker",
    "/settings": "cohort token create",
    "/configs/diff": "Nothing compared yet",
}
EMPTY_TABS = {
    "": "cohort worker",
    "/charts": "No metrics yet",
    "/rollouts": "No rollouts yet",
    "/checkpoints": "The first is saved after 100 steps",
    "/findings": "Detectors watch every step",
    "/timeline": "cohort worker",
    "/log": "No log yet",
    "/config": "config hash",
}
SEEDED = [
    "/runs", "/runs?state=active", "/runs?text=nothing", "/runs?tag=demo&sort=-last_reward", "/runs/1",
    "/runs/1?stage=0-sft",
    "/runs/2", "/runs/3", "/runs/1/charts", "/runs/1/charts?stage=0-sft", "/runs/1/rollouts", "/runs/1/rollouts?text=7",
    "/runs/1/rollouts?text=no+such+text", "/runs/1/rollouts?zero_part=accuracy&truncated=1", "/runs/1/checkpoints",
    "/runs/1/findings", "/runs/1/timeline", "/runs/1/log", "/runs/1/log?attempt=1", "/runs/1/log?search=step",
    "/runs/1/log?search=nothing+like+it", "/runs/3/log", "/runs/1/config", "/runs/1/steps/1-rl/12",
    "/runs/1/steps/1-rl/12?attempt=1", "/runs/1/groups/2-12-0", "/runs/1/groups/2-12-3?tokens=1", "/runs/new",
    "/runs/new?preset=r1", "/runs/new?clone=1", "/runs/new?view=yaml", "/configs",
    "/configs/diff?before=preset:demo&after=run:1",
    "/checkpoints", "/rewards", "/workers", "/settings",
]  # fmt: skip
ROOT = Path(__file__).parents[2]
MAX_PAGE_BYTES = 120_000


@pytest.fixture
def reader(seeded_app: FastAPI) -> Iterator[TestClient]:
    with browser(seeded_app) as client:
        client.headers["Accept"] = "text/html"
        yield client


@pytest.fixture
def newcomer(app: FastAPI) -> Iterator[TestClient]:
    with browser(app) as client:
        client.headers["Accept"] = "text/html"
        yield client


class Inline(HTMLParser):
    """Finds what the content-security policy forbids, duplicate ids, and elements that are never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag == "style" or "style" in names or (tag == "script" and not names.get("src")):
            self.found.append(f"<{tag} {attrs}>")
        self.found += [f"{tag} {name}" for name in names if name.startswith("on")]
        self.ids += [names["id"] or ""] if "id" in names else []


@pytest.mark.parametrize("path", SEEDED)
def test_a_page_renders_light_and_without_anything_inline(reader: TestClient, path: str) -> None:
    response = reader.get(path)
    assert response.status_code == 200, response.text
    assert len(response.content) < MAX_PAGE_BYTES
    page = Inline()
    page.feed(response.text)
    assert page.found == []
    assert sorted(page.ids) == sorted(set(page.ids))
    assert "default-src 'self'" in response.headers["Content-Security-Policy"]
    assert response.headers["Vary"] == "HX-Request"


@pytest.mark.parametrize(("path", "words"), EMPTY_STATES.items())
def test_an_empty_page_says_what_will_appear_and_how(newcomer: TestClient, path: str, words: str) -> None:
    assert words in newcomer.get(path).text


@pytest.mark.parametrize(("tab", "words"), EMPTY_TABS.items())
def test_a_tab_of_a_queued_run_says_what_will_appear(
    newcomer: TestClient, database: Database, tab: str, words: str
) -> None:
    with database.write() as session:
        create_run(session, ensure_first_user(session), seed.config())
    assert words in newcomer.get(f"/runs/1{tab}").text


HOSTILE_PAGES = [
    "/runs", "/runs/1", "/runs/1/rollouts?text=alert", "/runs/1/steps/1-rl/12", "/runs/1/groups/2-12-0?tokens=0",
    "/runs/1/log", "/runs/1/config", "/runs/new?clone=1", "/checkpoints",
]  # fmt: skip
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>&amp; {{ 7*7 }}'


def test_what_models_and_people_write_is_escaped_everywhere(
    app: FastAPI, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed, "make_groups", hostile_groups)
    seed.finished_run(database, settings, name=HOSTILE[:200], tags=[HOSTILE[:40]])
    with browser(app) as client:
        for path in HOSTILE_PAGES:
            text = client.get(path, headers={"Accept": "text/html"}).text
            assert "<script>alert" not in text, path
            assert "<img src=x" not in text, path
            assert "49" not in re.findall(r"&amp;amp; (\d+)", text), path
            assert "&lt;script&gt;" in text or "&lt;img" in text or "alert" in text, path


def hostile_groups(step: int, stage: RLStage, salt: int = 0) -> list[Group]:
    """The seed's groups with hostile text for prompt, completion, gold, tokens and explanation."""
    return [spoiled(group) for group in make_groups(step, stage, salt)]


def spoiled(group: Group) -> Group:
    prompt = replace(group.prompt, text=HOSTILE, id=HOSTILE, columns={"answer": HOSTILE, HOSTILE: HOSTILE})
    return replace(group, prompt=prompt, rollouts=[spoiled_rollout(rollout) for rollout in group.rollouts])


def spoiled_rollout(rollout: Rollout) -> Rollout:
    tokens = [HOSTILE] * len(rollout.completion.token_ids)
    completion = replace(rollout.completion, text=HOSTILE, token_texts=tokens)
    return replace(rollout, completion=completion, parts=[replace(p, explanation=HOSTILE) for p in rollout.parts])


def test_long_names_are_cut_in_the_middle_with_the_whole_as_title(newcomer: TestClient, database: Database) -> None:
    name = "begin " + "x" * 180 + " end"
    with database.write() as session:
        create_run(session, ensure_first_user(session), seed.config(name=name))
    for path in ("/runs", "/runs/1"):
        text = newcomer.get(path).text
        assert f'title="{name}"' in text
        assert re.search(r"begin x+…x+ end", text)


def test_a_missing_thing_is_a_page_with_a_sentence(reader: TestClient) -> None:
    for path in (
        "/runs/99",
        "/runs/1/steps/1-rl/999",
        "/runs/1/groups/2-12-77",
        "/runs/1/groups/x",
        "/configs/none",
        "/nowhere",
    ):
        response = reader.get(path)
        assert response.status_code in (400, 404), path
        assert 'role="alert"' in response.text
        assert "Traceback" not in response.text


@pytest.mark.parametrize(("reason", "shown"), [("engine_crash", True), ("out_of_memory", True), ("diverged", False)])
def test_lines_of_code_explain_a_failure_only_where_its_sentence_does_not(
    reader: TestClient, seeded_app: FastAPI, reason: str, shown: bool
) -> None:
    with seeded_app.state.database.write() as session:
        for run in session.scalars(select(Run).where(Run.state == "failed")):
            run.reason = reason
    page = reader.get("/runs/3").text
    assert "the device has no memory left" in page
    assert ("learner.py" in page) == shown


def test_nobody_sees_a_page_before_the_login(anonymous: TestClient) -> None:
    for path in ("/runs", "/runs/1", "/settings", "/checkpoints"):
        response = anonymous.get(path, headers={"Accept": "text/html"}, follow_redirects=False)
        assert response.status_code == 303
        assert response.headers["location"] == f"/login?next={path}"


def test_the_login_leads_back_but_never_to_another_site(anonymous: TestClient) -> None:
    assert 'value="/runs/1"' in anonymous.get("/login?next=/runs/1").text
    for bad in ("//evil.example", "https://evil.example", "/\\evil.example"):
        assert 'name="next" value="/runs"' in anonymous.get("/login", params={"next": bad}).text


def test_every_static_file_a_page_names_is_there(reader: TestClient) -> None:
    text = reader.get("/runs/1").text
    files = re.findall(r'(?:src|href)="(/static/[^"]+)"', text)
    assert len(files) >= 8
    assert all(reader.get(file).status_code == 200 for file in files)


def test_every_command_that_a_page_names_exists() -> None:
    sources = [*(ROOT / "templates").rglob("*.html"), ROOT / "app" / "runs" / "pages.py"]
    named = {words for path in sources for words in re.findall(r"cohort ([a-z]+(?: [a-z]+)?)", path.read_text())}
    commands = get_command(cli)
    assert isinstance(commands, TyperGroup)
    assert named
    for words in named:
        group, _, rest = words.partition(" ")
        command = commands.commands[group]
        assert not isinstance(command, TyperGroup) or rest in command.commands, words


def test_the_charts_say_how_many_points_of_their_stage_they_hide(reader: TestClient) -> None:
    query = {"stage": "1-rl", "names": '["reward/mean", "policy/kl", "optimizer/gradient_norm"]'}
    whole = reader.get("/runs/1/series", params=query).json()
    assert whole["hidden"] == {}
    assert len(whole["series"]["optimizer/gradient_norm"]) == seed.RL_STEPS
    assert [NAN_STEP, None, "nan"] in whole["series"]["policy/kl"]
    assert [mark["x"] for mark in whole["marks"]] == [seed.CHECKPOINT_EVERY + 1]
    coarse = reader.get("/runs/1/series", params={**query, "max_points": 10}).json()
    for name, points in coarse["series"].items():
        assert len(points) + coarse["hidden"][name] == seed.RL_STEPS
    assert [NAN_STEP, None, "nan"] in coarse["series"]["policy/kl"]


def test_warnings_of_the_engine_are_told(database: Database, settings: Settings, app: FastAPI) -> None:
    run = seed.running_run(database, settings)
    message = "the reward part brevity judged none of the 16 completions"
    with database.write() as session:
        attempt = session.scalars(select(Attempt).where(Attempt.run_id == run.id)).one()
        told = {"type": "warning", "payload": {"message": message}}
        session.add(JournalEvent(attempt_id=attempt.id, seq=9999, time=utc_now(), **told))
    assert message in browser(app).get(f"/runs/{run.number}/findings").text
