"""Playground and replay in a browser: from a stored completion to its judgement, from other rewards to what changes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.e2e.conftest import Open, Watcher, Web

ACCURACY = "rewards:\n- kind: accuracy\n  compare: number\n"


def test_a_stored_completion_is_judged_anew(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/groups/2-10-1")
    card = page.locator("#completion-0")
    card.locator("summary").click()
    card.get_by_role("link", name="in the playground").click()
    expect(page.get_by_role("heading", name="Playground")).to_be_visible()
    page.get_by_label("Parts as YAML").fill(ACCURACY)
    page.get_by_role("button", name="Judge").click()
    judged = page.locator("#part-accuracy")
    expect(judged.locator("mark")).to_be_visible()
    expect(judged).to_contain_text("gold")
    expect(page.get_by_label("Parts as YAML")).to_have_value(ACCURACY)


def test_the_playground_works_without_scripts_and_on_a_narrow_screen(
    web: Web, open_context: Open, watcher: Watcher
) -> None:
    context = open_context(java_script_enabled=False, viewport={"width": 360, "height": 740})
    page = watcher.watch(context.new_page())
    page.goto(f"{web.url}/rewards/playground")
    page.get_by_role("button", name="Judge").click()
    expect(page.locator("#judged h2")).to_contain_text("Reward 1.6")
    expect(page.locator("#part-step_validity")).to_contain_text("3 of 3 checkable steps are right")
    box = page.locator("#judged").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 360


def test_other_rewards_are_tried_on_a_runs_rollouts(page: Page, web: Web) -> None:
    page.goto(f"{web.url}/runs/1/rollouts")
    page.get_by_role("link", name="score them again").click()
    page.get_by_label("Rewards, YAML").fill(ACCURACY)
    page.get_by_role("button", name="Score again").click()
    expect(page.locator("#figures")).to_contain_text("rank correlation", timeout=60_000)
    expect(page.locator("#parts")).to_contain_text("accuracy@3f9a12c4 → accuracy@")
    page.get_by_role("link", name="replays").click()
    expect(page.get_by_role("row", name="1-rl")).to_contain_text("completed")
