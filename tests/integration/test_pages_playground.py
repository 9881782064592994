"""The playground: one completion judged by every chosen part, in a process of its own."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.rewards import playground
from tests.callers import bearer, browser, make_user

HTML = {"Accept": "text/html"}
ASKED: dict[str, Any] = {
    "prompt": "2+3=", "completion": "<think>wait, 2+3</think>It is <b>5</b>", "gold": "5",
    "part": ["accuracy", "format"],
}  # fmt: skip


def posted(app: FastAPI, **changes: Any) -> tuple[int, str]:
    with browser(app) as client:
        answer = client.post("/rewards/playground", data=ASKED | changes, headers=HTML)
    return answer.status_code, answer.text


def test_every_part_is_shown_with_its_span_its_reason_and_the_sum(app: FastAPI) -> None:
    yaml = "- kind: accuracy\n  extract: last_number\n  compare: number\n- {kind: format, weight: 0.25}\n"
    status, text = posted(app, yaml=yaml)
    assert status == 200
    assert "Reward 1.250" in text
    assert 'It is &lt;b&gt;</span><mark class="right" title="right: accuracy">5</mark>' in text
    assert "0.25 × 1.000 = +0.250" in text
    assert "reflection <b>1</b>" in text


def test_a_wrong_answer_and_an_abstention_are_told_apart(app: FastAPI) -> None:
    _, text = posted(app, completion="<think></think>6", part=["accuracy", "step_validity"])
    assert "Reward 0.000" in text
    assert '<mark class="wrong" title="wrong: accuracy">6</mark>' in text
    assert "abstained, left out of the sum" in text


def test_other_columns_reach_the_parts(app: FastAPI) -> None:
    columns = '{"constraints": [{"kind": "forbidden_characters", "characters": ","}]}'
    _, text = posted(app, completion="a, b", part=["instruction_following"], columns=columns)
    assert "Reward 0.000" in text
    assert "0 of 1 constraint" in text


def test_what_is_wrong_is_said_and_the_form_keeps_what_was_typed(app: FastAPI) -> None:
    for changes, word in (
        ({"yaml": "- {kind: tase}"}, "tase"), ({"columns": "{"}, "is not JSON"), ({"part": []}, "no part is chosen"),
        ({"yaml": "rewards: []"}, "rewards"), ({"yaml": "- {kind: judge}"}, "needs a model"),
        ({"yaml": "rewards: [{kind: format}]\nsandbox: {tier: unsafe}"}, "sandbox"),
    ):  # fmt: skip
        status, text = posted(app, **changes)
        assert status == 422, changes
        assert word in text, changes
        assert "&lt;think&gt;wait, 2+3" in text, changes


def test_an_unknown_kind_is_named_with_those_there_are(app: FastAPI) -> None:
    _, text = posted(app, yaml="rewards: [{kind: nope}]")
    assert "rewards.0.kind" in text
    assert "is not known here" in text
    assert "use one of accuracy, format" in text


def test_ones_own_reward_is_called_for_those_who_may_execute_code(app: FastAPI, client: TestClient) -> None:
    source = "def reward(completions, **columns):\n    return [0.75 for _ in completions]\n"
    assert client.post("/api/v1/rewards", json={"name": "mine", "source": source}).status_code == 201
    assert "Reward 0.750" in posted(app, yaml="- {kind: custom, name: mine}")[1]
    runner = make_user(app, ["read", "run"])
    with browser(app, runner) as other:
        refused = other.post("/rewards/playground", data=ASKED | {"yaml": "- {kind: custom, name: mine}"}, headers=HTML)
    assert (refused.status_code, "permission code" in refused.text) == (403, True)


def test_a_reward_that_never_returns_is_ended(app: FastAPI, client: TestClient) -> None:
    source = "import time\ndef reward(completions, **columns):\n    time.sleep(600)\n"
    client.post("/api/v1/rewards", json={"name": "hangs", "source": source})
    app.state.settings = app.state.settings.model_copy(update={"preflight_limit_s": 2.0})
    status, text = posted(app, yaml="- {kind: custom, name: hangs}")
    assert status == 503
    assert "longer than 2 s" in text


def test_judging_needs_the_permission_to_run(app: FastAPI) -> None:
    with browser(app, make_user(app, ["read"])) as client:
        assert "Judging needs the permission" in client.get("/rewards/playground", headers=HTML).text
        assert client.post("/rewards/playground", data=ASKED, headers=HTML).status_code == 403


def test_no_reward_can_take_the_playgrounds_address(client: TestClient) -> None:
    body = {"name": "playground", "source": "def reward(completions): return [1]"}
    assert client.post("/api/v1/rewards", json=body).status_code == 422


def test_a_stored_completion_is_filled_in_with_its_stages_rewards(seeded_app: FastAPI) -> None:
    with browser(seeded_app) as client:
        link = "/rewards/playground?run=1&place=2-10-1&completion=2"
        assert link.replace("&", "&amp;") in client.get("/runs/1/groups/2-10-1", headers=HTML).text
        text = client.get(link, headers=HTML).text
        assert "run 1, group 2-10-1, completion 3" in text
        assert "max_tokens: 64" in text
        assert client.get("/rewards/playground?run=1&place=9", headers=HTML).status_code == 400
        assert client.get("/rewards/playground", headers=bearer(seeded_app) | HTML).status_code == 200


def test_what_a_stage_of_the_gym_is_rewarded_for_needs_its_data() -> None:
    data, gym, form = {"source": "reasoning_gym", "task": "chain_sum"}, {"kind": "gym"}, {"kind": "format"}
    stage = {"data": data, "rewards": [gym], "reward_clip": None, "num_steps": 2}
    assert playground.rewards_of_stage(stage) == {"data": data, "rewards": [gym]}
    assert playground.rewards_of_stage(stage | {"rewards": [form], "reward_clip": [0, 1]}) == {
        "rewards": [form], "reward_clip": [0, 1]
    }  # fmt: skip
