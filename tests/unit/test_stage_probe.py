"""The probe on real models: a sampler with a copy of the policy, updated, forgotten, half updated."""

from functools import partial

import pytest
import torch

from grpo_engine.config_rollout import ProbeConfig
from grpo_engine.config_training import LoraAdapter
from grpo_engine.model.adapters import adapter_tensors, add_adapter, merged_weights
from grpo_engine.model.greedy import greedy_scores
from grpo_engine.model.loading import Policy
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.stages.probe import TOLERANCE_NATS, make_probe
from grpo_engine.types import Prompt
from tests.unit.tiny_models import TOKENIZER, tiny_model


class Source:
    """Prompts of 1, 2, 3 … tokens."""

    size = None

    def take(self, position, count):
        return [Prompt(str(p), p, "", [4 + p] * (p + 1), {}) for p in range(position, position + count)]

    def held_out(self, count):
        return []


def trained(family):
    """A policy as the learner leaves it, a step away from where the sampler's copy begins."""
    model = tiny_model(family)
    LogprobForward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    return model


def probe_of(model, dtype="float32", config=None):
    score = partial(greedy_scores, model, dtype=dtype)
    return make_probe(config or ProbeConfig(), Source(), dtype=dtype, max_context_tokens=64, score=score)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
def test_a_copy_passes_once_it_has_the_weights(family):
    model, copy = trained(family), TorchSampler(tiny_model(family), TOKENIZER, {2}, 64)
    probe = probe_of(model)
    assert probe.measure(copy).gap_nats > probe.tolerance_nats == TOLERANCE_NATS["float32"]
    copy.load_weights(merged_weights(model), 1)
    assert probe.measure(copy).largest_nats < 1e-4


def test_one_tensor_that_did_not_arrive_is_noticed():
    model, copy = trained("llama"), TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64)
    old = dict(tiny_model("llama").named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    copy.load_weights([(n, old[n] if n == name else tensor) for n, tensor in merged_weights(model)], 1)
    assert probe_of(model).measure(copy).gap_nats > TOLERANCE_NATS["float32"]


def test_an_adapter_is_compared_with_its_merged_copy():
    model, copy = tiny_model("llama").eval(), TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64)
    add_adapter(Policy(model, TOKENIZER, frozenset({2}), 64, torch.device("cpu")), LoraAdapter(rank=2), seed=0)
    with torch.no_grad():
        for parameter in adapter_tensors(model).values():
            parameter.add_(0.3)
    assert probe_of(model).measure(copy).gap_nats > TOLERANCE_NATS["float32"]
    copy.load_weights(merged_weights(model), 1)
    assert probe_of(model).measure(copy).largest_nats < 1e-4


def test_bfloat16_is_given_its_rounding():
    model, copy = trained("llama"), TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64, dtype="bfloat16")
    copy.load_weights(merged_weights(model), 1)
    probe = probe_of(model, "bfloat16")
    assert probe.tolerance_nats == 0.25
    assert probe.measure(copy).largest_nats <= 0.25


def test_the_probe_is_made_of_the_first_prompts_and_stays_within_the_context():
    config = ProbeConfig(num_tokens=1000, tolerance_nats=0.5)
    probe = probe_of(tiny_model("llama"), config=config)
    assert [len(prompt_ids) for prompt_ids in probe.prompts] == [1, 2, 3, 4]
    assert (probe.num_tokens, probe.tolerance_nats) == (60, 0.5)
