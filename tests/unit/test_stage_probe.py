"""The probe on real models: a sampler with a copy of the policy, updated, forgotten, half updated."""

from functools import partial

import pytest
import torch

from grpo_engine.config_rollout import ProbeConfig
from grpo_engine.config_training import LoraAdapter
from grpo_engine.model.adapters import adapter_tensors, add_adapter, merged_weights
from grpo_engine.model.greedy import GreedyScores, greedy_scores
from grpo_engine.model.loading import Policy
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.stages.probe import TOLERANCE_NATS, SyncProbe, make_probe
from grpo_engine.types import Completion, Prompt
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


def test_a_prompt_that_the_source_drops_is_replaced_by_the_next():
    source = Source()
    every = source.take
    source.take = lambda position, count: [prompt for prompt in every(position, count) if prompt.position != 1]
    probe = make_probe(ProbeConfig(), source, dtype="float32", max_context_tokens=64, score=None)
    assert [len(prompt_ids) for prompt_ids in probe.prompts] == [1, 3, 4, 5]


class Telling:
    """Gives these completions, whatever is asked."""

    def __init__(self, *logprobs):
        self.completions = [Completion([3] * len(told), "", "length", told, told) for told in logprobs]

    def sample(self, requests, sampling):
        return self.completions


def measured(sampler, *scores):
    return SyncProbe([[5], [6]], 2, 1e-3, lambda rows: [GreedyScores(*pair) for pair in scores]).measure(sampler)


def test_every_token_of_every_prompt_counts():
    own = [-1.0, -2.0]
    for place in range(4):
        off = [0.0] * 4
        off[place] = 0.5
        told = [[own[0] + off[0], own[1] + off[1]], [own[0] + off[2], own[1] + off[3]]]
        result = measured(Telling(own, own), *[(own, likeliest) for likeliest in told])
        assert (result.gap_nats, result.choice_gap_nats, result.num_tokens) == (0.0, 0.5, 4)
        result = measured(Telling(*told), (own, own), (own, own))
        assert (result.gap_nats, result.choice_gap_nats, result.num_tokens) == (0.5, 0.0, 4)


@pytest.mark.parametrize("told", [[[-1.0, -2.0]], [[-1.0, -2.0], [-1.0]], [[-1.0, -2.0]] * 3])
def test_a_sampler_that_answers_only_in_part_cannot_pass(told):
    own = [-1.0, -2.0]
    with pytest.raises(ValueError, match=r"zip\(\)"):
        measured(Telling(*told), (own, own), (own, own))
