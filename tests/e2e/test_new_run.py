"""The form of a new run in a browser: fields from the schema, YAML both ways, errors in place, check, save, fork."""

import re

from playwright.sync_api import Page, expect

from app.runs.service import get_run
from tests.e2e.conftest import Watcher, Web


def test_another_kind_of_data_shows_its_own_fields_and_keeps_the_rest(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='name']").fill("my own name")
    page.locator("[name='stages.1.data.source']").select_option("file")
    expect(page.locator("[name='stages.1.data.path']")).to_be_visible()
    expect(page.locator("[name='name']")).to_have_value("my own name")


def test_another_loss_and_advantage_start_from_their_own_defaults_and_sections_stay_open(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    for part in ("loss", "advantage"):
        page.locator(f"[id='s-stages.1.{part}'] > summary").click()
    page.locator("[name='stages.1.loss.kind']").select_option(label="GSPO")
    expect(page.locator("[name='stages.1.loss.clip_high']")).to_have_value("0.0004")
    page.locator("[name='stages.1.advantage.kind']").select_option(label="GAE (PPO)")
    expect(page.locator("[name='stages.1.advantage.gae_lambda']")).to_be_visible()
    expect(page.locator("[name='stages.1.advantage.whiten']")).to_be_checked()
    expect(page.locator("[name='stages.1.loss.clip_high']")).to_be_visible()


def test_a_reward_is_added_moved_and_removed(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    rewards = page.locator("[id='s-stages.1.rewards']")
    rewards.get_by_role("button", name="Add a part of kind custom").click()
    expect(page.locator("[name='stages.1.rewards.3.name']")).to_be_visible()
    rewards.get_by_role("button", name="Move reward 4 up").click()
    expect(page.locator("[name='stages.1.rewards.2.kind']")).to_have_value("custom")
    rewards.get_by_role("button", name="Remove reward 3").click()
    expect(page.locator("[name='stages.1.rewards.2.kind']")).to_have_value("length")
    expect(page.locator("[name='stages.1.rewards.3.kind']")).to_have_count(0)


def test_form_and_yaml_say_the_same(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='seed']").fill("41")
    page.get_by_role("button", name="YAML").click()
    text = page.locator("#yaml")
    expect(text).to_have_value(re.compile(r"^seed: 41$", re.MULTILINE))
    text.fill(text.input_value().replace("seed: 41", "seed: 42"))
    page.get_by_role("button", name="Form", exact=True).click()
    expect(page.locator("[name='seed']")).to_have_value("42")


def test_a_wrong_field_is_named_where_it_stands_and_the_input_is_kept(page: Page, web: Web, watcher: Watcher) -> None:
    watcher.expected.append("status of 422")
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='stages.1.group_size']").fill("1")
    page.locator("[id='s-stages.1.kl'] > summary").click()
    page.locator("[name='stages.1.kl.weight']").fill("much")
    page.get_by_role("button", name="Launch the run").click()
    wrong = page.locator("[name='stages.1.group_size']")
    expect(wrong).to_have_value("1")
    expect(wrong).to_have_attribute("aria-invalid", "true")
    described = wrong.get_attribute("aria-describedby") or ""
    expect(page.locator(f"[id='{described.split()[-1]}']")).to_contain_text("2")
    expect(page.locator("[name='stages.1.kl.weight']")).to_have_value("much")
    expect(page.get_by_role("alert").first).to_contain_text("stages.1.group_size")


def test_the_check_shows_prompts_and_gold_rewards(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.get_by_role("button", name="Check").click()
    report = page.locator("#report")
    expect(report).to_contain_text("ready to run", timeout=60_000)
    assert len(re.findall(r"\d+\+\d+=", report.inner_text())) >= 3


def test_a_config_is_saved_in_versions_and_compared(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    for seed in ("1", "2"):
        page.locator("[name='seed']").fill(seed)
        page.locator("#save-name").fill("addition")
        page.get_by_role("button", name="Save a new version").click()
        page.wait_for_url(re.compile(rf"config=addition@{seed}"))
    page.goto(f"{web.url}/configs")
    page.get_by_role("link", name="What changed").click()
    expect(page.locator("table.list tbody tr")).to_have_count(1)
    expect(page.locator("table.list tbody tr")).to_contain_text(re.compile(r"seed\s*1\s*2"))


def test_a_run_is_launched_from_the_form(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='name']").fill("from the form")
    page.get_by_role("button", name="Launch the run").click()
    page.wait_for_url("**/runs/4")
    expect(page.locator("h1")).to_have_text("from the form")
    expect(page.locator("#run-head .pill")).to_contain_text("queued")


def test_a_run_starts_from_a_checkpoint_with_changed_settings(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/checkpoints")
    page.get_by_role("row", name="1-rl, step 16").get_by_role("link", name="Start a run from it").click()
    page.locator("[name='stages.1.num_steps']").fill("40")
    page.get_by_role("button", name="Launch the run").click()
    page.wait_for_url("**/runs/4")
    with web.database.read() as session:
        run = get_run(session, 4)
    assert run.parent_checkpoint_id is not None
    assert run.config["stages"][1]["num_steps"] == 40


def test_the_enter_key_launches_nothing(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='name']").press("Enter")
    expect(page.locator("h1")).to_have_text("New run")


def test_a_refused_request_says_so_and_keeps_what_was_typed(page: Page, web: Web, watcher: Watcher) -> None:
    watcher.expected.append("status of 401")
    page.goto(f"{web.url}/runs/new?preset=demo")
    page.locator("[name='name']").fill("typed for an hour")
    page.context.clear_cookies()
    page.get_by_role("button", name="YAML").click()
    expect(page.locator("#notices")).to_contain_text("Sign in")
    expect(page.locator("[name='name']")).to_have_value("typed for an hour")
