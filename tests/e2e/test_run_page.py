"""The run page in a browser: charts, the way to a completion, live points, buttons."""

import re

from playwright.sync_api import Page, Route, expect

from app.models import Run
from app.runs.service import get_run
from tests.e2e.conftest import Open, Watcher, Web
from tests.e2e.running import RunningJournal
from tests.waiting import wait_until


def test_a_point_of_a_chart_leads_to_the_completions_of_a_prompt(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1")
    over = page.locator("figure", has_text="Completion length").locator(".u-over")
    over.click(position={"x": 60, "y": 40})
    page.wait_for_url(re.compile(r"/runs/1/steps/1-rl/\d+$"))
    page.locator("table.list tbody tr").nth(1).locator("td.name a").click()
    page.wait_for_url(re.compile(r"/runs/1/groups/"))
    expect(page.locator("h1")).to_have_text("group 2 of 4")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text("group 3 of 4")
    page.keyboard.press("[")
    expect(page.locator("h1")).to_have_text("group 2 of 4")


def test_the_keyboard_walks_a_chart_and_opens_its_step(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1")
    plot = page.locator("figure", has_text="Entropy").locator(".plot")
    page.locator("[data-charts][data-ready]").wait_for()
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("figure", has_text="Entropy").locator("[data-latest]")).to_contain_text("step 23")
    page.keyboard.press("Enter")
    page.wait_for_url("**/steps/1-rl/23")


def numbers(text: str) -> list[float]:
    return [float(number.replace("−", "-").replace("+", "")) for number in re.findall(r"[−+]?\d+\.\d+", text)]


def test_the_arithmetic_on_the_group_page_is_right(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/groups/2-12-1")
    for card in page.locator(".completion").all():
        reward = numbers(card.get_by_text("reward").first.inner_text())[0]
        parts = numbers(re.sub(r"([−+]) ", r"\1", card.locator(".line .sub").nth(1).inner_text()))
        assert abs(sum(parts) - reward) < 2e-3
        written = card.locator(".line.small .sub").nth(1).inner_text()
        taken, mean, std, advantage = (abs(n) for n in numbers(written))
        assert abs(taken - mean) / std - advantage < 6e-3
    page.locator(".completion").first.locator("summary").click()
    page.locator(".completion").first.get_by_text("token by token").click()
    expect(page.locator("#tokens h2")).to_have_text("Completion 1, token by token")
    assert "log-probability" in (page.locator("#tokens .tokens span").first.get_attribute("title") or "")


def test_a_page_is_live_though_the_scripts_behind_htmx_come_late(page: Page, web: Web) -> None:
    held: list[Route] = []
    page.route("**/vendor/hx-sse.min.js*", lambda route: held.append(route))
    page.goto(f"{web.url}/runs/2/log", wait_until="commit")
    read = "Boolean(window.htmx) && document.readyState === 'interactive'"
    wait_until(lambda: page.evaluate(read) and held, 20, "the document is read, htmx has run")
    page.evaluate("new Promise(resolve => setTimeout(resolve))")  # behind the timer of an htmx that waits for nothing
    with page.expect_response("**/runs/2/events*"):
        held[0].continue_()


def test_points_arrive_without_reload_and_the_stream_ends_with_the_run(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2")
    page.evaluate("window.sameDocument = true")
    page.locator("[data-charts][data-ready]").wait_for()
    latest = page.locator("figure", has_text="Completion length").locator("[data-latest]")
    expect(latest).to_have_text("22.0 tokens")
    journal = RunningJournal(web, 2)
    journal.step(16, {"completion/mean_length_tokens": 77.7, "reward/mean": 0.9})
    expect(latest).to_have_text("77.7 tokens")
    expect(page.locator("#run-head")).to_contain_text("step 16 of 24")
    journal.append("evaluation", step=16, benchmark="held out", num_prompts=8, metrics={"accuracy_greedy": 0.625})
    expect(page.locator("figure", has_text="Held-out accuracy").locator("[data-latest]")).to_have_text("63 %")
    journal.finish()
    expect(page.locator("#run-head .pill")).to_contain_text("completed")
    assert page.evaluate("window.sameDocument") is True


def test_early_stopping_is_overridden_from_the_page(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2")
    page.get_by_role("button", name="Observe only").click()
    expect(page.locator("#early-stopping h2")).to_contain_text("observes only, set by hand")
    with web.database.read() as session:
        assert get_run(session, 2).early_stopping_override == "observe"


def test_a_running_run_is_paused_and_cancelled(page: Page, web: Web) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{web.url}/runs/2")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#run-head .pill")).to_contain_text("pausing")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#run-head .pill")).to_contain_text("cancelling")
    with web.database.read() as session:
        run: Run = get_run(session, 2)
    assert run.state == "cancelling"


def test_a_failed_run_shows_its_cause_in_the_first_screen(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/3")
    cause = page.locator(".cause")
    expect(cause).to_contain_text("Out of memory")
    expect(cause).to_contain_text("torch.OutOfMemoryError: no memory")
    box = cause.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 940


def test_the_charts_mark_what_is_not_finite_and_what_was_repeated(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1")
    expect(page.locator("figure", has_text="KL to the reference").locator(".note")).to_contain_text(
        "1 not finite, first at step 5"
    )
    expect(page.locator("[data-marks]")).to_have_text("attempt 2 trained 5 steps again")
    page.get_by_role("button", name="log", exact=True).click()
    expect(page.locator("figure", has_text="Reward and its parts").locator(".note")).to_contain_text(
        "not on a log scale"
    )


def test_smoothing_is_remembered(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1")
    page.locator("#smoothing").fill("0.9")
    page.goto(f"{web.url}/runs/1/charts")
    expect(page.locator("#smoothing + output")).to_have_text("0.90")


def test_everything_can_be_read_without_script(open_context: Open, watcher: Watcher, web: Web) -> None:
    page = watcher.watch(open_context(java_script_enabled=False).new_page())
    page.goto(f"{web.url}/runs/1/groups/2-12-1?tokens=0")
    expect(page.locator("#tokens .tokens span").first).to_be_visible()
    page.goto(f"{web.url}/runs/1/charts")
    expect(page.locator("figure").first).to_be_visible()
    page.goto(f"{web.url}/runs/2")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_the_self_test_opens_and_stays_open_when_the_run_goes_on(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2")
    card = page.locator("#self-test")
    expect(card).to_contain_text("all 6 passed")
    card.get_by_text("what was checked").click()
    with web.database.write() as session:
        run = get_run(session, 2)
        run.version, run.step = run.version + 1, run.step + 1
    expect(page.locator("#run-status")).to_contain_text(f"step {run.step} of")
    expect(card.get_by_text("a completion ends at <eos>").first).to_be_visible()
