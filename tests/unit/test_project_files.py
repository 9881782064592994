"""What the repository promises about itself: pins, vendored files, containers, make targets."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>]", name)[0]).lower()


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] + extras["engine"] + PROJECT["dependency-groups"]["dev"]
    pinned = {canonical(name) for name in PINS}
    assert {canonical(name) for name in wanted} <= pinned


def test_torch_and_transformers_are_the_pair_that_vllm_on_cpu_accepts() -> None:
    assert (PINS["torch"], PINS["transformers"]) == ("2.13.0", "5.19.0")


def test_constraints_name_plain_versions_only() -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in PINS.values())


def vendored() -> list[tuple[str, str]]:
    table = (ROOT / "app/static/vendor/VENDORED.md").read_text()
    return re.findall(r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", table, re.MULTILINE)


def test_vendored_files_are_the_ones_recorded() -> None:
    rows = vendored()
    assert {name for name, _ in rows} == {"htmx.min.js", "hx-sse.min.js", "uPlot.iife.min.js", "uPlot.min.css"}
    for name, recorded in rows:
        assert hashlib.sha256((ROOT / "app/static/vendor" / name).read_bytes()).hexdigest() == recorded, name


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    return loaded


def test_compose_has_every_part_of_the_house() -> None:
    services = compose()["services"]
    assert {"postgres", "redis", "migrate", "web", "scheduler", "worker"} == set(services)
    for name in ("web", "scheduler", "worker", "migrate"):
        assert (ROOT / "docker" / ".." / services[name]["build"]["dockerfile"]).exists()
        assert services[name]["environment"]["COHORT_DATABASE_URL"].startswith("postgresql+psycopg://")
        assert services[name]["volumes"] == compose()["services"]["web"]["volumes"]


def test_compose_holds_no_secret_and_opens_only_loopback() -> None:
    text = (ROOT / "docker/compose.yaml").read_text()
    assert not re.search(r"(PASSWORD|SECRET_KEY): (?!\$\{)", text)
    assert compose()["services"]["web"]["ports"] == ["127.0.0.1:8000:8000"]


def test_containers_get_only_paths_that_exist() -> None:
    for dockerfile in (ROOT / "docker").glob("Dockerfile.*"):
        for line in re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE):
            assert all((ROOT / source).exists() for source in line.split()), line


def test_workers_in_containers_can_have_the_strongest_sandbox() -> None:
    assert "install -y --no-install-recommends bubblewrap" in (ROOT / "docker/Dockerfile.worker").read_text()


TARGETS = "demo up install test lint test-unit test-integration test-e2e test-slow bench-training clean"


@pytest.mark.parametrize("target", TARGETS.split())
def test_make_knows_its_targets(target: str) -> None:
    assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_files_of_tests_that_run_alone_are_where_make_looks_for_them() -> None:
    marked = {path.name: path.read_text() for path in (ROOT / "tests" / "integration").glob("test_*.py")}
    alone = {name for name, text in marked.items() if "mark.alone" in text and "mark.slow" not in text}
    assert alone
    assert all(name.startswith("test_sandbox_") for name in alone), alone
    assert 'tests/integration/test_sandbox_*.py -m "alone and not slow"' in (ROOT / "Makefile").read_text()


def test_an_old_python_is_one_clear_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    python.chmod(0o755)
    command = ["make", "install", f"PYTHON={python}", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == f"Cohort needs Python 3.11, but {python} is Python 3.9.1."


def test_a_missing_python_is_one_clear_sentence(tmp_path: Path) -> None:
    command = ["make", "install", "PYTHON=python-that-is-not", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'python-that-is-not' was not found" in done.stderr.splitlines()[0]
