"""Taking over weights, prefilling once, and what the cache does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_training import LoraAdapter
from grpo_engine.model.adapters import adapter_tensors, add_adapter, merged_weights
from grpo_engine.model.loading import Policy
from grpo_engine.rollout.choice import inverse_distribution
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import SampleRequest
from tests.unit.tiny_models import TOKENIZER, tiny_model

SAMPLING = SamplingConfig(max_new_tokens=12)
REQUESTS = [SampleRequest([13, 16], (0, copy), "0") for copy in range(6)]


def changed(family: str) -> Any:
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    return model


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_copy_samples_with_the_weights_it_was_given(family: str) -> None:
    learner = changed(family)
    copy = TorchSampler(tiny_model(family), TOKENIZER, {2}, 64)
    before = copy.sample(REQUESTS, SAMPLING)
    copy.load_weights(learner.named_parameters(), policy_version=5)
    after = copy.sample(REQUESTS, SAMPLING)
    assert after == [with_version(c, 5) for c in TorchSampler(learner, TOKENIZER, {2}, 64).sample(REQUESTS, SAMPLING)]
    assert before != after


def with_version(completion: Any, version: int) -> Any:
    return type(completion)(**{**fields_of(completion), "policy_version": version})


def fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_a_shared_module_only_takes_the_version() -> None:
    model = tiny_model("llama")
    before = [p.detach().clone() for p in model.parameters()]
    sampler = TorchSampler(model, TOKENIZER, {2}, 64)
    sampler.load_weights(model.named_parameters(), policy_version=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {completion.policy_version for completion in sampler.sample(REQUESTS, SAMPLING)} == {3}


def test_told_that_it_shares_the_module_it_does_not_even_read_the_weights() -> None:
    model = tiny_model("llama")
    before = [p.detach().clone() for p in model.parameters()]
    weights = iter(changed("llama").named_parameters())
    sampler = TorchSampler(model, TOKENIZER, {2}, 64, shares_weights=True)
    sampler.load_weights(weights, policy_version=4)
    assert next(weights)[0] == "model.embed_tokens.weight"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {completion.policy_version for completion in sampler.sample(REQUESTS, SAMPLING)} == {4}


def test_an_adapted_policy_samples_as_its_merged_copy() -> None:
    model = tiny_model("llama").eval()
    add_adapter(Policy(model, TOKENIZER, frozenset({2}), 64, torch.device("cpu")), LoraAdapter(rank=2), seed=0)
    with torch.no_grad():
        for parameter in adapter_tensors(model).values():
            parameter.add_(0.3)
    copy = TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64)
    base = copy.sample(REQUESTS, SAMPLING)
    copy.load_weights(merged_weights(model), policy_version=0)
    shared = TorchSampler(model, TOKENIZER, {2}, 64, shares_weights=True)
    tokens = [completion.token_ids for completion in shared.sample(REQUESTS, SAMPLING)]
    assert tokens == [completion.token_ids for completion in copy.sample(REQUESTS, SAMPLING)]
    assert tokens != [completion.token_ids for completion in base]


def test_weights_that_do_not_fit_are_refused_and_the_version_stays() -> None:
    sampler = TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64)
    weights = dict(tiny_model("llama").named_parameters())
    with pytest.raises(ValueError, match="no parameter extra"):
        sampler.load_weights([*weights.items(), ("extra", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="of shape"):
        sampler.load_weights([*weights.items(), ("model.norm.weight", torch.zeros(5))], 1)
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"1 parameters were not given, model\.norm\.weight"):
        sampler.load_weights(weights.items(), 1)
    assert sampler.policy_version == 0


def test_equal_prompts_are_prefilled_once_and_finished_rows_leave() -> None:
    shapes: list[tuple[int, ...]] = []
    model = tiny_model("llama")
    model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    asked = [SampleRequest(prompt, (0, n, copy), "g") for n, prompt in enumerate(([13, 16], [9])) for copy in range(16)]
    TorchSampler(model, TOKENIZER, {2, 5, 7, 20}, 64).sample(asked, SamplingConfig(max_new_tokens=40))
    assert shapes[0] == (2, 2)
    rows = [shape[0] for shape in shapes[1:]]
    assert rows[0] == 32
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 8


def test_with_fixed_shapes_finished_rows_stay() -> None:
    shapes: list[tuple[int, ...]] = []
    model = tiny_model("llama")
    model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    TorchSampler(model, TOKENIZER, {2}, 64, fixed_shapes=True).sample(REQUESTS, SAMPLING)
    assert set(shapes[1:]) == {(6, 1)}


def test_bfloat16_computes_under_autocast_and_reports_float32() -> None:
    sampler = TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64, dtype="bfloat16")
    exact = TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64).sample(REQUESTS, SAMPLING)
    rough = sampler.sample(REQUESTS, SAMPLING)
    assert rough[0].logprobs[0] == pytest.approx(exact[0].logprobs[0], abs=0.1)
    assert rough[0].logprobs != exact[0].logprobs


def test_a_model_without_key_value_cache_in_every_layer_is_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        TorchSampler(model, TOKENIZER, {2}, 64)


def test_the_inverse_distribution_meets_only_possible_tokens() -> None:
    logprobs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log()
    numbers = [0.0, 0.2499999, 0.2500001, 0.9, 1 - 2**-53]
    found = inverse_distribution(logprobs.expand(5, -1), torch.tensor(numbers, dtype=torch.float64))
    assert found.tolist() == [1, 1, 3, 3, 3]
