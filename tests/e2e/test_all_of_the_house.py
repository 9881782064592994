"""The whole house as a newcomer meets it: broker, web, scheduler, worker, engine; everything done in the browser.

The longest test of this folder and, by its name, the first: another process has all the others meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import Watcher, free_port
from tests.e2e.test_run_page import numbers
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(420)
COHORT = [sys.executable, "-c", "from app.cli import main; main()"]
TRAINED_MS = 180_000


@dataclass
class House:
    url: str
    login_link: str


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """`cohort up` on an empty home."""
    port = free_port()
    output = tmp_path / "cohort.out"
    environment = os.environ | {"COHORT_HOME": str(tmp_path / "home"), "COHORT_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with open(output, "wb") as out:
        process = subprocess.Popen([*COHORT, "up"], stdout=out, stderr=out, env=environment, start_new_session=True)

    def link() -> re.Match[str] | None:
        assert process.poll() is None, output.read_text()
        return re.search(r"http://\S+/login/\S+", output.read_text())

    found = wait_until(link, 60, "cohort up prints its login link")
    assert found is not None
    yield House(f"http://127.0.0.1:{port}", found[0])
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0, output.read_text()


@pytest.fixture
def visitor(house: House, chromium: Browser, watcher: Watcher) -> Iterator[Page]:
    """A browser that followed the login link."""
    context = chromium.new_context(viewport={"width": 1440, "height": 940})
    page = watcher.watch(context.new_page())
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(house.login_link)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/runs")
    yield page
    context.close()


def launch(page: Page, house: House, preset: str, **fields: str) -> str:
    """Launch a preset from the form; returns the run page's address."""
    page.goto(f"{house.url}/runs/new?preset={preset}")
    for path, value in fields.items():
        page.locator(f"[name='{path}']").fill(value)
    page.get_by_role("button", name="Launch the run").click()
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    return page.url


def watch_points_arrive(page: Page) -> None:
    """Reinforcement learning begins, then more points come into the same document."""
    expect(page.locator("[data-charts]")).to_have_attribute("data-stage", "1-rl", timeout=TRAINED_MS)
    page.locator("[data-charts][data-ready]").wait_for()
    page.evaluate("window.sameDocument = true")
    status = page.locator("#run-status")
    first = int(re.findall(r"step (\d+)", status.inner_text())[0])

    def later() -> bool:
        page.wait_for_timeout(100)
        steps = re.findall(r"step (\d+)", status.inner_text())
        return not steps or int(steps[0]) >= first + 3

    wait_until(later, 60, "three more steps on the page")
    assert page.evaluate("window.sameDocument") is True


def read_a_completion(page: Page) -> None:
    """From a point of a chart to a group, whose arithmetic is checked; then a search over all completions."""
    run = page.url
    page.locator("figure", has_text="Completion length").locator(".u-over").click(position={"x": 150, "y": 60})
    page.wait_for_url(re.compile(r"/steps/1-rl/\d+$"))
    page.locator("tbody tr", has_text="yes").first.locator("td.name a").click()
    page.wait_for_url(re.compile(r"/groups/"))
    cards = page.locator(".completion").all()
    assert len(cards) == 8
    for card in cards:
        reward = numbers(card.get_by_text("reward").first.inner_text())[0]
        parts = numbers(re.sub(r"([−+]) ", r"\1", card.locator(".line .sub").nth(1).inner_text()))
        assert abs(sum(parts) - reward) < 2e-3
        taken, mean, std, advantage = (abs(n) for n in numbers(card.locator(".line.small .sub").nth(1).inner_text()))
        assert abs(abs(taken - mean) / std - advantage) < 0.02
    page.goto(f"{run}/rollouts")
    page.get_by_placeholder("completion contains…").fill("<think>")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("table.list tbody tr").first).to_contain_text("<think>")


def take_a_checkpoint(page: Page, folder: Path) -> None:
    """Verify and download the newest one; its folder holds what from_pretrained needs."""
    page.locator("table.list tbody tr").first.locator("a").first.click()
    page.get_by_role("button", name="Verify the hashes").click()
    expect(page.locator(".pagehead .pill")).to_contain_text("verified")
    with page.expect_download() as waiting:
        page.get_by_role("link", name=re.compile("^Download ")).click()
    waiting.value.save_as(folder / "checkpoint.tar")
    with tarfile.open(folder / "checkpoint.tar") as archive:
        archive.extractall(folder, filter="data")
    root = next(folder.glob("run-1-*"))
    assert json.loads((root / "config.json").read_text())["model_type"] == "llama"
    assert {"model.safetensors", "tokenizer.json", "manifest.json"} <= {path.name for path in root.iterdir()}


def test_from_the_login_link_to_a_forked_and_cancelled_run(visitor: Page, house: House, tmp_path: Path) -> None:
    page = visitor
    run = launch(page, house, "demo-short", name="first run")
    watch_points_arrive(page)
    expect(page.locator("#run-head .pill")).to_contain_text("completed", timeout=TRAINED_MS)
    page.goto(run)
    page.locator("[data-charts][data-ready]").wait_for()
    read_a_completion(page)
    page.goto(f"{run}/checkpoints")
    take_a_checkpoint(page, tmp_path)
    page.get_by_role("link", name="Start a new run from this checkpoint").click()
    page.locator("[name='name']").fill("the fork")
    page.locator("[name='stages.1.num_steps']").fill("5000")
    page.get_by_role("button", name="Launch the run").click()
    page.wait_for_url("**/runs/2")
    expect(page.locator("#run-head .pill")).to_contain_text("running", timeout=60_000)
    expect(page.locator("#run-status")).to_contain_text("1-rl · step 4", timeout=60_000)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#run-head .pill")).to_contain_text("cancelled", timeout=60_000)
