"""The real engine trains every kind of recipe for a few steps; what the formulas are worth is tested in tests/unit."""

import pytest

from grpo_engine.diagnostics.catalogue import info
from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, newest_checkpoint, run_engine

pytestmark = pytest.mark.xdist_group("recipes")

RECIPES = {
    "ppo": {"advantage": {"kind": "gae", "value": {"learning_rate": 1e-3}}},
    "ppo, shared": {
        "advantage": {"kind": "gae", "value": {"backbone": "shared", "warmup_steps": 2}},
        "epochs": 2,
    },
    "dapo": {
        "loss": {"kind": "clip", "clip_high": 0.28, "dual_clip": 3},
        "minibatches": 2,
        "entropy": {"top_share": 0.5},
    },
    "gspo": {
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "gspo"},
        "kl": {"weight": 0.01, "place": "reward", "estimator": "k1"},
    },
    "cispo": {"advantage": {"kind": "rank"}, "loss": {"kind": "cispo"}, "correction": {"kind": "truncate"}},
    "dr_grpo": {
        "advantage": {"kind": "dr_grpo"},
        "loss": {"kind": "clip", "normalizer": "constant"},
        "kl": {"weight": 0.01, "unbiased": True},
    },
    "auxiliary": {
        "advantage": {"kind": "seed_paper", "smooth_rewards": True},
        "auxiliary": {"weight": 0.1},
        "entropy": {"bonus": 0.01},
        "old_logprobs": "sampler",
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with a stage of two batches for each recipe, after a supervised one."""
    sampling = {"temperature": 0.7, "top_k": 4, "max_new_tokens": 16}
    stages = [rl_stage(num_steps=4, sampling=sampling, **recipe) for recipe in RECIPES.values()]
    folder = tmp_path_factory.mktemp("recipes") / "run"
    assert run_engine(tiny_config(sft_stage(num_steps=1), *stages), folder) == 0
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_to_its_end(finished, recipe):
    stage = f"{1 + list(RECIPES).index(recipe)}-rl"
    steps = [event for event in named(finished, "metrics") if event.stage == stage]
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert all(not event.nonfinite for event in steps)
    assert ("value/loss" in steps[-1].values) == recipe.startswith("ppo")
    assert ("reward/smoothed" in steps[-1].values) == (recipe == "auxiliary")
    assert [name for name in steps[-1].values if info(name).description == "Not in the catalogue."] == []


def test_every_stage_tests_itself_and_says_so(finished):
    tests = named(finished, "self_test")
    names = {stage: [test.name for test in tests if test.stage == stage] for stage in ("0-sft", "1-rl", "7-rl")}
    assert names["0-sft"] == ["end_tokens", "special_tokens", "gradient_invariance"]
    assert names["1-rl"] == names["7-rl"]
    assert names["1-rl"][2:] == ["sampler_and_trainer_agree", "on_policy_ratio", "gradient_invariance"]
    assert all(test.passed for test in tests)


def test_a_policy_that_explodes_is_rolled_back_and_keeps_a_good_checkpoint(tmp_path):
    stage = rl_stage(
        num_steps=8, optimizer={"learning_rate": 1.0}, guards={"action": "rollback", "max_kl": 0.5, "max_rollbacks": 2}
    )
    assert run_engine(tiny_config(stage), tmp_path / "run") == 1
    [failure] = named(tmp_path / "run", "failed")
    assert failure.reason == "diverged"
    assert "is the last good checkpoint" in failure.message
    found = [event for event in named(tmp_path / "run", "finding") if event.detector.startswith("guard")]
    assert len(found) == 3
    assert (tmp_path / "run" / "checkpoints" / "0-rl-000000" / "manifest.json").is_file()


def test_a_fork_of_a_slowed_down_run_begins_with_its_own_rate(tmp_path):
    guards = {"action": "rollback", "max_kl": 1e-12}  # the first update is one too many
    config = tiny_config(rl_stage(num_steps=3, guards=guards))
    assert run_engine(config, tmp_path / "run") == 0
    assert named(tmp_path / "run", "metrics")[-1].values["optimizer/learning_rate"] == 5e-4
    forked = tiny_config(rl_stage(num_steps=4))
    assert run_engine(forked, tmp_path / "fork", "--fork", str(newest_checkpoint(tmp_path / "run"))) == 0
    assert named(tmp_path / "fork", "metrics")[0].values["optimizer/learning_rate"] == 1e-3
