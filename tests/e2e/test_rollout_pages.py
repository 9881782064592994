"""How completions are sampled, in a browser: the form's backends, the Rollout card, charts, a checkpoint's heads."""

import re

from playwright.sync_api import Page, expect

from app.runs.service import get_run
from tests.e2e.conftest import Watcher, Web
from tests.e2e.running import RunningJournal


def test_vllm_is_chosen_with_speculation_and_stop_texts(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("#s-rollout > summary").click()
    page.locator("[name='rollout.backend']").select_option(label="vLLM in process")
    page.locator("[id='s-rollout.speculation'] > summary").click()
    page.locator("[name='rollout.speculation.given']").select_option("on")
    page.locator("[name='rollout.speculation.method']").select_option("ngram")
    page.locator("[name='rollout.enforce_eager']").select_option("false")
    page.locator("[id='s-stages.1.sampling'] > summary").click()
    page.locator("[name='stages.1.sampling.stop']").fill("\\n\\n\na, b")
    page.get_by_role("button", name="Launch the run").click()
    page.wait_for_url("**/runs/4")
    with web.database.read() as session:
        config = get_run(session, 4).config
    assert config["rollout"]["speculation"]["method"] == "ngram"
    assert config["rollout"]["enforce_eager"] is False
    assert config["stages"][1]["sampling"]["stop"] == ["\n\n", "a, b"]


def test_a_missing_method_is_named_where_it_stands(page: Page, web: Web, watcher: Watcher) -> None:
    watcher.expected.append("status of 422")
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("#s-rollout > summary").click()
    page.locator("[name='rollout.backend']").select_option(label="vLLM servers")
    page.locator("[id='s-rollout.speculation'] > summary").click()
    page.locator("[name='rollout.speculation.given']").select_option("on")
    page.get_by_role("button", name="Launch the run").click()
    expect(page.locator("[id='f-rollout-speculation-method-error']")).to_contain_text("is required")
    expect(page.locator("[name='rollout.speculation.method']")).to_have_attribute("aria-invalid", "true")


def test_the_rollout_card_follows_the_run(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2")
    card = page.locator("#rollout")
    expect(card.locator("h2")).to_have_text("Rollout own decoder")
    expect(card).to_contain_text("MTP heads, 2–5 or none")
    expect(card.get_by_role("img", name=re.compile("^draft length: 0 16 %, 2 30 %"))).to_be_visible()
    RunningJournal(web, 2).step(16, {"reward/mean": 0.9, "rollout/draft_length_share_0": 0.77})
    expect(card.get_by_role("img", name=re.compile("^draft length: 0 77 %"))).to_be_visible()


def test_draft_lengths_are_one_chart_with_a_line_each(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/charts")
    page.locator("[data-charts][data-ready]").wait_for()
    chart = page.locator("figure", has_text="Draft lengths")
    expect(chart).to_have_count(1)
    expect(chart.locator(".legend > span")).to_have_text([re.compile(rf"^{n} drafted") for n in (0, 2, 3, 4, 5)])
    expect(chart.locator(".u-over")).to_be_visible()


def test_short_times_are_in_milliseconds_when_they_arrive_too(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/2/charts")
    page.locator("[data-charts][data-ready]").wait_for()
    latest = page.locator("figure", has_text="Weight update").locator("[data-latest]")
    expect(latest).to_have_text("4.00 ms")
    RunningJournal(web, 2).step(16, {"rollout/sync_s": 0.0123})
    expect(latest).to_have_text("12.3 ms")


def test_a_checkpoint_says_that_it_holds_heads(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/checkpoints")
    page.get_by_role("link", name="1-rl, step 24").click()
    parts = page.locator("#parts")
    expect(parts.get_by_role("row", name="MTP heads")).to_contain_text("1.20 kB")
    expect(page.get_by_role("link", name="trainer/mtp/mtp.safetensors")).to_be_visible()
