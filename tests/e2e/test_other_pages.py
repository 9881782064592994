"""The other pages in a browser: logging in, downloads, search, log, tokens, rewards, theme, a narrow window."""

import re
import tarfile
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import Open, Watcher, Web
from tests.e2e.running import RunningJournal

PATHS = [
    "/runs", "/runs/1", "/runs/2", "/runs/3", "/runs/1/charts", "/runs/1/rollouts", "/runs/1/rollouts?text=7",
    "/runs/1/checkpoints", "/runs/1/findings", "/runs/1/timeline", "/runs/3/log", "/runs/1/config",
    "/runs/1/steps/1-rl/12", "/runs/1/groups/2-12-1?tokens=0", "/runs/new", "/runs/new?view=yaml", "/configs",
    "/configs/diff?before=preset:demo&after=run:1", "/checkpoints", "/rewards", "/workers", "/settings",
]  # fmt: skip


def test_a_login_link_works_once_and_only_by_its_button(chromium: Browser, web: Web, watcher: Watcher) -> None:
    watcher.expected.append("status of 401")
    link = web.login_link()
    context = chromium.new_context()
    page = watcher.watch(context.new_page())
    for _ in range(2):
        page.goto(link)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/runs")
    page.get_by_role("button", name="Log out").click()
    page.goto(link)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("used or has expired")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_window_of_360_pixels(open_context: Open, watcher: Watcher, web: Web, scheme: str) -> None:
    context = open_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = watcher.watch(context.new_page())
    for path in PATHS:
        page.goto(web.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path


def test_the_theme_is_chosen_in_the_settings_and_kept(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/settings")
    page.get_by_label("Theme").select_option("dark")
    page.goto(f"{web.url}/runs")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 20)"


def test_a_checkpoint_is_verified_and_downloaded(page: Page, web: Web, tmp_path: Path) -> None:
    page.goto(f"{web.url}/runs/1/checkpoints")
    page.get_by_role("link", name="1-rl, step 24").click()
    page.get_by_role("button", name="Verify the hashes").click()
    expect(page.locator(".pagehead .pill")).to_contain_text("verified")
    with page.expect_download() as waiting:
        page.get_by_role("link", name=re.compile("^Download ")).click()
    waiting.value.save_as(tmp_path / "checkpoint.tar")
    with tarfile.open(tmp_path / "checkpoint.tar") as archive:
        assert "run-1-1-rl-000024/model.safetensors" in archive.getnames()


def test_completions_are_found_and_one_prompt_followed(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("</think>")
    page.get_by_label("Reward from").fill("1")
    page.get_by_role("button", name="Search").click()
    rows = page.locator("table.list tbody tr")
    expect(rows.first).to_contain_text("</think>")
    prompt = rows.first.locator("td").nth(1).locator("a")
    name = prompt.inner_text()
    prompt.click()
    expect(page.get_by_label("Prompt id")).to_have_value(name)
    assert {row.locator("td").nth(1).inner_text() for row in rows.all()} == {name}


def test_the_log_grows_while_it_is_read_and_is_searched(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2/log")
    log = page.locator("#run-log")
    expect(log).to_contain_text("step 15 reward")
    journal = RunningJournal(web, 2)
    journal.log("WARNING <b>something</b> odd")
    journal.step(16, {"loss": 0.1})
    expect(log).to_contain_text("WARNING <b>something</b> odd")
    page.get_by_label("Lines that contain").fill("SOMETHING")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("pre.log mark")).to_have_text("WARNING <b>something</b> odd")


def test_a_token_is_shown_once_and_revoked(page: Page, web: Web) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{web.url}/settings")
    page.get_by_label("Name of the new token").fill("laptop")
    page.get_by_role("button", name="Make a token").click()
    token = page.locator("code.secret").inner_text()
    headers = {"Authorization": f"Bearer {token}"}
    assert page.request.get(f"{web.url}/api/v1/me", headers=headers).ok
    page.goto(f"{web.url}/settings")
    expect(page.locator("code.secret")).to_have_count(0)
    page.get_by_role("button", name="Revoke").click()
    expect(page.locator("#tokens")).to_contain_text("No token yet")


def test_a_reward_is_registered_and_a_broken_one_is_refused_at_its_field(
    page: Page, web: Web, watcher: Watcher
) -> None:
    watcher.expected.append("status of 422")
    page.goto(f"{web.url}/rewards")
    page.get_by_label("Name").fill("short")
    page.get_by_label("Source").fill("def reward(:")
    page.get_by_role("button", name="Register").click()
    expect(page.locator("#error-source")).to_contain_text("line 1")
    page.get_by_label("Source").fill("def reward(completions, **columns):\n    return [0.0 for _ in completions]\n")
    page.get_by_role("button", name="Register").click()
    page.wait_for_url("**/rewards/short")


def test_a_worker_is_drained(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/workers")
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("table.list .pill").first).to_contain_text("draining")


def test_runs_are_filtered_and_sorted(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs")
    page.get_by_label("state").select_option("failed")
    page.wait_for_url(re.compile("state=failed"))
    expect(page.locator("table.list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="clear").click()
    page.get_by_role("link", name="run", exact=True).click()
    expect(page.locator("td.name a").first).to_have_text("learn to think")


def test_the_list_of_runs_stays_fresh_and_rests_while_hidden(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs")
    row = page.locator("table.list tbody tr", has_text="still learning")
    RunningJournal(web, 2).step(16, {"reward/mean": 0.987})
    expect(row).to_contain_text("0.987")
    hide = "Object.defineProperty(document, 'hidden', {value: true})"
    page.evaluate(hide)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(4000)
    assert asked == []
