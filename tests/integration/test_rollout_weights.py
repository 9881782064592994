"""Taking over weights, prefilling once, and what the cache does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_training import LoraAdapter
from grpo_engine.model.adapters import adapter_tensors, add_adapter, merged_weights
from grpo_engine.model.loading import Policy
from grpo_engine.rollout import choice
from grpo_engine.rollout.choice import inverse_distribution
from grpo_engine.rollout.expected_lengths import ExpectedLengths
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


def shapes_of(model: Any) -> list[tuple[int, ...]]:
    """Shapes of what the model is fed from now on."""
    shapes: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def grouped(prompts: list[list[int]], size: int) -> list[SampleRequest]:
    return [SampleRequest(p, (0, n, copy), str(n)) for n, p in enumerate(prompts) for copy in range(size)]


def test_equal_prompts_are_prefilled_once_without_padding_and_finished_rows_leave() -> None:
    model = tiny_model("llama")
    sampler = TorchSampler(model, TOKENIZER, {2, 5, 7, 20}, 64)
    shapes = shapes_of(model)
    sampler.sample(grouped([[13, 16], [9]], 16), SamplingConfig(max_new_tokens=40))
    assert shapes[:2] == [(1, 3), (32, 1)]
    rows = [shape[0] for shape in shapes[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 8


def test_places_of_finished_rows_are_refilled_while_others_go_on() -> None:
    model = tiny_model("llama")
    sampler = TorchSampler(model, TOKENIZER, {2, 5, 7, 20}, 64, max_rows=16)
    shapes = shapes_of(model)
    sampler.sample(grouped([[3 + n, 16] for n in range(24)], 4), SamplingConfig(max_new_tokens=40))
    prefills = [index for index, shape in enumerate(shapes) if shape[0] == 1 and shape[1] > 1]
    assert len(prefills) > 10
    # As long as prompts wait, nearly every place is taken: a refill waits for an eighth of them.
    assert {shape[0] for shape in shapes[: prefills[-1]]} <= {1, 14, 15, 16}
    assert sampler.take_metrics()["rollout/slot_use_share"] > 0.85
    assert sampler.take_metrics() == {}


def test_a_group_larger_than_the_batch_is_divided() -> None:
    asked = grouped([[13, 16]], 10)
    small, large = (TorchSampler(tiny_model("llama"), TOKENIZER, {2}, 64, max_rows=n) for n in (4, 64))
    assert [c.token_ids for c in small.sample(asked, SAMPLING)] == [c.token_ids for c in large.sample(asked, SAMPLING)]


def test_stragglers_wait_until_all_have_started_and_go_on_as_before() -> None:
    asked, sampling = grouped([[3 + n, 16] for n in range(40)], 2), SamplingConfig(max_new_tokens=60)
    plain = TorchSampler(tiny_model("llama"), TOKENIZER, {2, 5, 7, 20}, 64).sample(asked, sampling)
    lengths = ExpectedLengths()
    lengths.learn([request.prompt_ids for request in asked], [len(c.token_ids) for c in plain])
    sampler = TorchSampler(tiny_model("llama"), TOKENIZER, {2, 5, 7, 20}, 64, max_rows=8, lengths=lengths)
    completions = sampler.sample(asked, sampling)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    for ours, theirs in zip(completions, plain, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert sampler.take_metrics()["rollout/straggler_rows"] >= 1


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
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]) * 3  # they need not add up to 1
    numbers = [0.0, 0.2499999, 0.2500001, 0.9, 1 - 2**-53]
    found = inverse_distribution(weights.expand(5, -1), torch.tensor(numbers, dtype=torch.float64))
    assert found.tolist() == [1, 1, 3, 3, 3]


@pytest.fixture(params=["C", "torch"])
def picked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C where there is a compiler, and by torch, as accelerators do."""
    if request.param == "torch":
        monkeypatch.setattr(choice, "pick", lambda *_, **__: None)


@pytest.mark.usefixtures("picked_by")
@pytest.mark.parametrize("vocabulary", [9, 5003])
def test_the_token_of_a_row_of_nan_is_one_of_the_vocabulary(vocabulary: int) -> None:
    chosen = choice.choose(torch.full((2, vocabulary), float("nan")), SamplingConfig(), torch.rand(2).double())
    assert (chosen.tokens_B < vocabulary).all()
    assert chosen.full_logprobs_B.isnan().all()


@pytest.mark.usefixtures("picked_by")
def test_a_large_vocabulary_is_searched_in_blocks_with_the_same_result() -> None:
    """Against a plain float64 cumulative sum; numbers at the edges of ids differ by float32 rounding only."""
    torch.manual_seed(0)
    logits = torch.randn(6, 5003) * 3
    logits[:, 4700:4990] = float("-inf")
    numbers = torch.tensor([0.0, 1e-9, 0.3, 0.77, 0.999999, 1 - 2**-53], dtype=torch.float64)
    chosen = choice.choose(logits, SamplingConfig(), numbers)
    exact = logits.double().softmax(-1).cumsum(-1)
    below = torch.cat([torch.zeros(6, 1), exact[:, :-1]], 1).gather(1, chosen.tokens_B[:, None])[:, 0]
    assert ((below - 1e-7 <= numbers) & (numbers <= exact.gather(1, chosen.tokens_B[:, None])[:, 0] + 1e-7)).all()
    assert torch.isfinite(logits.gather(1, chosen.tokens_B[:, None])).all()
    expected = logits.log_softmax(-1).gather(1, chosen.tokens_B[:, None])[:, 0]
    torch.testing.assert_close(chosen.full_logprobs_B, expected, rtol=1e-6, atol=1e-6)
