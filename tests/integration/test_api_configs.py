from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.configs import checking
from app.configs.service import parse
from app.errors import Unavailable
from app.settings import Settings
from tests import seed
from tests.callers import bearer
from tests.invalid_configs import BASE, CASES, SCHEMA, Invalid, changed, write_files

CONFIG = seed.config().model_dump(mode="json")
CUSTOM = {"stages.0.rewards": [{"kind": "custom", "name": "mine"}]}
SLEEPER = """
import os, subprocess, sys, time
def reward(completions, **columns):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({path!r}, "w").write(f"{{os.getpid()}} {{child.pid}} " + " ".join(sorted(os.environ)))
    time.sleep(600)
"""


# ---------------------------------------------------------------- named configs
def test_saving_makes_versions_and_the_same_config_none(any_client: TestClient) -> None:
    def save(**changes: Any) -> dict[str, Any]:
        answer = any_client.post("/api/v1/configs", json={"name": "my config", "config": {**CONFIG, **changes}})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    assert [save()["version"], save()["version"], save(seed=7)["version"]] == [1, 1, 2]
    [summary] = any_client.get("/api/v1/configs").json()["items"]
    assert (summary["name"], summary["version"], summary["num_versions"]) == ("my config", 2, 2)
    assert any_client.get("/api/v1/configs/my config").json()["data"]["seed"] == 7
    assert any_client.get("/api/v1/configs/my config/versions/1").json()["data"]["seed"] == 0
    versions = any_client.get("/api/v1/configs/my config/versions").json()["items"]
    assert [entry["version"] for entry in versions] == [2, 1]
    told = any_client.get("/api/v1/configs/diff", params={"before": "my config@1", "after": "my config"}).json()
    assert told["changes"] == [{"path": "seed", "before": 0, "after": 7}]


@pytest.mark.parametrize("name", ["", "../up", "a/b", "x" * 201, " lead", "a\x00"])
def test_a_name_that_is_none_is_refused(client: TestClient, name: str) -> None:
    answer = client.post("/api/v1/configs", json={"name": name, "config": CONFIG})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "name"


@pytest.mark.parametrize("reference", ["nothing", "nothing@1", "preset:nothing", "run:77", "my@x", "preset:../x"])
def test_comparing_with_nothing_says_so(client: TestClient, reference: str) -> None:
    answer = client.get("/api/v1/configs/diff", params={"before": reference, "after": "preset:demo"})
    assert answer.status_code in (400, 404)


def test_presets_are_shown_as_written_and_as_resolved(client: TestClient) -> None:
    found = {preset["name"]: preset for preset in client.get("/api/v1/presets").json()["items"]}
    assert found["demo"]["data"]["stages"][1]["group_size"]
    assert yaml.safe_load(found["demo"]["yaml"])["name"] == found["demo"]["data"]["name"]
    assert client.get("/api/v1/presets/demo").json() == found["demo"]


def test_the_schema_is_served_whole(client: TestClient) -> None:
    schema = client.get("/api/v1/schema/run-config").json()
    assert "group_size" in schema["$defs"]["RLStage"]["properties"]


# ---------------------------------------------------------------- invalid configs
@pytest.mark.parametrize("case", SCHEMA, ids=lambda case: case.name)
@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v1/configs"])
def test_every_door_of_the_api_names_the_field(client: TestClient, tmp_path: Path, case: Invalid, path: str) -> None:
    body = {"config_yaml": case.config_text(tmp_path), **({"name": "n"} if path.endswith("configs") else {})}
    problem = client.post(path, json=body).json()
    assert problem["status"] == 422
    found = [entry for entry in problem["errors"] if entry["field"] == case.field]
    assert found, problem
    assert case.word in found[0]["message"] + found[0]["remedy"] + found[0]["value"]


PREFLIGHT = [case for case in CASES if case.found_by == "preflight"][:3]


@pytest.mark.parametrize("case", PREFLIGHT, ids=lambda case: case.name)
def test_the_check_finds_what_the_schema_cannot(client: TestClient, tmp_path: Path, case: Invalid) -> None:
    write_files(tmp_path)
    report = client.post("/api/v1/configs/check", json={"config_yaml": case.config_text(tmp_path)}).json()
    assert case.field in [problem["field"] for problem in report["problems"]]


# ---------------------------------------------------------------- checks
def test_a_check_reads_data_and_calls_rewards_in_another_process(client: TestClient) -> None:
    report = client.post("/api/v1/configs/check", json={"config": BASE}).json()
    assert report["problems"] == []
    assert len(report["prompts"]) == 3
    assert report["memory"]


def register(client: TestClient, source: str) -> None:
    assert client.post("/api/v1/rewards", json={"name": "mine", "source": source}).status_code == 201


def test_only_users_with_the_code_permission_have_their_rewards_called(
    client: TestClient, app: FastAPI, tmp_path: Path
) -> None:
    mark = tmp_path / "called"
    register(
        client, f"def reward(completions, **c):\n    open({str(mark)!r}, 'w')\n    return [0.5] * len(completions)\n"
    )
    body = {"config": changed(CUSTOM)}
    without = client.post("/api/v1/configs/check", json=body, headers=bearer(app, ["read", "run"])).json()
    assert without["problems"] == []
    assert any("mine" in str(warning) for warning in without["warnings"])
    assert not mark.exists()
    assert client.post("/api/v1/configs/check", json=body).json()["problems"] == []
    assert mark.exists()


def test_a_reward_that_never_returns_is_ended_with_all_it_started(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = settings.model_copy(update={"preflight_limit_s": 6.0})
    mark = tmp_path / "pids"
    monkeypatch.setenv("COHORT_SECRET_KEY", "not for rewards")
    started = time.monotonic()
    with pytest.raises(Unavailable, match="longer than 6 s"):
        checking.check(limited, parse(changed(CUSTOM)), {"mine": SLEEPER.format(path=str(mark))})
    assert time.monotonic() - started < 30
    words = mark.read_text().split()
    assert not [pid for pid in words[:2] if is_running(int(pid))]
    assert not [name for name in words[2:] if name.startswith("COHORT_")]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
