"""The same fault is told alike at every door: form, API and command line name field, value and remedy."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.callers import browser
from tests.invalid_configs import CASES, Invalid, write_files
from tests.typed import Typed

NAMES = (
    "group size 1", "misspelt field", "rate NaN", "unknown reward", "buffer above max", "clip_high moved",
    "normalize_std moved", "kl_weight moved", "max_micro_batch_rows moved", "unknown advantage", "lambda above 1",
    "dual clip below 1", "minibatches above prompts", "steps that end within a batch", "difference counted twice",
    "geometric mean truncated", "adapter of rank 0",
)  # fmt: skip
CHECKED = (
    "model path missing", "no such column", "empty dataset", "prompt too long", "critic alone to the end",
    "more ranks than completions",
)  # fmt: skip


def chosen(names: tuple[str, ...]) -> list[Invalid]:
    return [case for case in CASES if case.name in names]


@pytest.mark.parametrize("case", chosen(NAMES), ids=lambda case: case.name)
def test_form_api_and_command_line_refuse_alike(
    app: FastAPI, client: TestClient, typed: Typed, tmp_path: Path, case: Invalid
) -> None:
    text = case.config_text(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    [problem] = client.post("/api/v1/runs", json={"config_yaml": text}).json()["errors"]
    assert problem["field"] == case.field
    status, output, _ = typed("config", "check", "-f", str(tmp_path / "bad.yaml"))
    assert status == 2
    page = browser(app).post("/runs/new/launch", data={"view": "yaml", "yaml": text})
    assert page.status_code == 422
    for said in (problem["field"], problem["message"], problem["remedy"]):
        assert said in output
        assert said in html.unescape(page.text)


@pytest.mark.parametrize("case", chosen(CHECKED), ids=lambda case: case.name)
def test_the_check_says_alike_in_form_api_and_command_line(
    app: FastAPI, client: TestClient, typed: Typed, tmp_path: Path, case: Invalid
) -> None:
    write_files(tmp_path)
    text = case.config_text(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    problems = client.post("/api/v1/configs/check", json={"config_yaml": text}).json()["problems"]
    problem = next(problem for problem in problems if problem["field"] == case.field)
    status, output, _ = typed("config", "check", "-f", str(tmp_path / "bad.yaml"))
    assert status == 2
    page = browser(app).post("/runs/new/check", data={"view": "yaml", "yaml": text})
    for said in (problem["field"], problem["message"], problem["remedy"]):
        assert said in output
        assert said in html.unescape(page.text)
