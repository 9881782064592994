"""A real run with a judge and a reward model, and a resumed one that asks the judge nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from grpo_engine.model.tokenizer import character_tokenizer
from tests.engine_configs import rl_stage, tiny_config
from tests.engine_process import named, run_engine
from tests.judge_stub import Asked, Reply, judge_stub, scored

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def by_length(number: int, asked: Asked) -> Reply:
    answer = json.loads(asked.body["messages"][1]["content"])["answer"]
    return scored(min(10, len(answer)))


def reward_model(folder: Path) -> str:
    torch.manual_seed(3)
    widths = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(**widths, vocab_size=len(character_tokenizer()), num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    return {event.step: event.values for event in named(folder, "metrics")}


def test_a_resumed_run_gets_the_same_verdicts_and_asks_nothing_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with judge_stub(by_length) as stub:
        rewards = [
            {"kind": "accuracy", "compare": "number"},
            {"kind": "judge", "base_url": stub.url, "model": "m", "rubric": "r"},
            {"kind": "reward_model", "model": reward_model(tmp_path / "model")},
        ]  # fmt: skip
        config = tiny_config(rl_stage(rewards=rewards, num_steps=4, checkpoint={"every_steps": 2}))
        assert run_engine(config, first) == 0
        num_asked = len(stub.asked)
        assert run_engine(config, second, "--resume", str(first / "checkpoints" / "0-rl-000002")) == 0
        assert len(stub.asked) == num_asked > 8
    whole, resumed = metrics(first), metrics(second)
    assert sorted(resumed) == [3, 4]
    for step, values in resumed.items():
        assert values["reward/judge_cached"] > 0
        assert values["reward/learned_spread"] > 0
        assert values["reward/mean"] == whole[step]["reward/mean"]
    assert sum(values["reward/judge_requests"] for values in whole.values()) == num_asked
