"""Whole runs that sample with vLLM: probed after every update, evaluated and self-tested with the same sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, run_engine
from tests.vllm_models import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
R1_SAMPLING = {"temperature": 0.7, "top_k": 4, "max_new_tokens": 12}
BACKENDS: dict[str, dict[str, Any]] = {
    "vllm": {"backend": "vllm"},
    "two servers": {"backend": "vllm_server", "num_servers": 2},
}


@pytest.fixture(scope="module", params=BACKENDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps each of supervised fine-tuning and reinforcement learning as R1 samples."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    stage = rl_stage(
        num_steps=2, sampling=R1_SAMPLING, old_logprobs="sampler", evaluation={"every_steps": 2, "num_prompts": 4}
    )
    model = {"source": "tiny_llama", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_context_tokens": 64}
    config = tiny_config(
        sft_stage(num_steps=2), stage, deterministic=False, model=model, rollout=BACKENDS[request.param]
    )
    assert run_engine(config, folder, seconds=800) == 0
    return folder


def test_every_update_is_probed_and_arrives(run: Path) -> None:
    updates = named(run, "weight_sync")
    assert [update.policy_version for update in updates] == [2, 3, 4]  # before the first batch, and after each
    assert len({update.checksum for update in updates}) == 3
    assert all(max(update.probe_gap_nats, update.choice_gap_nats) < 1e-3 for update in updates)
    assert not any(update.repeated for update in updates)


def test_sampler_and_trainer_agree_on_truncated_samples(run: Path) -> None:
    tests = {event.name: event for event in named(run, "self_test") if event.stage == "1-rl"}
    assert tests["sampler_and_trainer_agree"].passed, tests["sampler_and_trainer_agree"].detail
    assert tests["on_policy_ratio"].passed


def test_the_steps_tell_what_the_sampler_did(run: Path) -> None:
    steps = [event.values for event in named(run, "metrics") if event.stage == "1-rl"]
    assert len(steps) == 2
    assert all(values["rollout/probe_gap_nats"] < 1e-3 and values["rollout/sync_s"] > 0 for values in steps)
    assert all(abs(values["policy/ratio_mean"] - 1) <= 1e-3 for values in steps)  # of trainer to sampler
    assert {event.step for event in named(run, "evaluation")} == {0, 2}
