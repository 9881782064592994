"""Whole runs under every way of sampling that needs no vLLM."""

import json

import pytest

from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, newest_checkpoint, run_engine

SHORT = rl_stage(num_steps=4, checkpoint={"every_steps": 2}, evaluation={"every_steps": 4, "num_prompts": 4})


def run(folder, *, stage=None, **changes):
    stages = [sft_stage(num_steps=2), stage or SHORT]
    config = tiny_config(*stages, **({"deterministic": False} | changes))
    assert run_engine(config, folder) == 0
    return [event.values for event in named(folder, "metrics") if event.stage == "1-rl"]


def backend(**settings):
    return {"rollout": {"backend": "torch", **settings}}


def test_few_rows_at_once_sample_all_completions_and_tell_how_full_they_were(tmp_path):
    steps = run(tmp_path / "run", **backend(max_rows=4))
    assert len(steps) == 4
    assert all(0.3 < values["rollout/slot_use_share"] <= 1 for values in steps)
    assert all(values["rollout/sync_s"] < 1 for values in steps)
    assert {event.num_completions for event in named(tmp_path / "run", "rollouts")} == {16}


@pytest.mark.slow
def test_learned_lengths_are_in_the_checkpoint_and_a_deterministic_run_learns_none(tmp_path):
    run(tmp_path / "free", **backend(max_rows=4))
    state = json.loads((newest_checkpoint(tmp_path / "free") / "trainer" / "state.json").read_text())
    assert state["lengths"]["mean"] > 0
    run(tmp_path / "fixed", deterministic=True)
    state = json.loads((newest_checkpoint(tmp_path / "fixed") / "trainer" / "state.json").read_text())
    assert state["lengths"] == {}


@pytest.mark.parametrize(
    ("drafts", "mtp"),
    [({"kind": "ngram", "min_match": 1, "fixed_tokens": 2}, {}), ({"kind": "mtp", "fixed_tokens": 2}, {"depth": 2})],
)
def test_drafts_train_to_the_end_and_tell_what_was_accepted(tmp_path, drafts, mtp):
    steps = run(tmp_path / "run", mtp=mtp, **backend(drafts=drafts))
    assert sum(values["rollout/drafted_tokens"] for values in steps) > 0
    assert all(values["rollout/tokens_per_forward"] >= 1 for values in steps)
    assert {"rollout/accepted_share_1", "rollout/draft_length_share_2"} <= steps[-1].keys()
    tests = {event.name: event.passed for event in named(tmp_path / "run", "self_test")}
    assert tests["sampler_and_trainer_agree"]


def test_prompts_without_room_are_left_out_of_training_and_counted(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10)]
    rows[4]["prompt"] = "1+" * 30
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "held_out_rows": 0, "chat_template": False}
    steps = run(tmp_path / "run", stage=rl_stage(data=data, num_steps=4))
    assert sum(values.get("groups/too_long", 0) for values in steps) >= 1  # 16 of 10 rows: once an epoch
    assert {event.num_groups for event in named(tmp_path / "run", "rollouts")} == {4}
