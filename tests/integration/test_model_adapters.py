from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_engine.config_training import LoraAdapter
from grpo_engine.errors import CheckpointInvalid, InvalidConfig
from grpo_engine.model.adapters import (
    FrozenAdapter,
    adapter_off,
    adapter_tensors,
    add_adapter,
    base_hash,
    has_adapter,
    load_adapter_tensors,
    merge_in_place,
    merged_weights,
)
from grpo_engine.model.loading import Policy
from tests.unit.tiny_models import TOKENIZER, tiny_model

FAMILIES = ["llama", "mistral", "qwen2", "gpt2"]
IDS = torch.tensor([[13, 16, 4, 9, 9, 21], [7, 5, 3, 11, 20, 6]])


def adapted(family: str = "llama", seed: int = 0, **options: Any) -> PreTrainedModel:
    model = tiny_model(family).eval()  # GPT-2 has dropout
    add_adapter(policy_of(model), LoraAdapter(**({"rank": 4} | options)), seed)
    return model


def policy_of(model: PreTrainedModel) -> Policy:
    return Policy(model, TOKENIZER, frozenset({2}), 64, torch.device("cpu"))


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


def train_a_little(model: PreTrainedModel, steps: int = 1) -> None:
    optimizer = torch.optim.AdamW(adapter_tensors(model).values(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


def bits(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_policy_starts_as_the_base_and_trains_only_the_adapter(family: str) -> None:
    before, model = logprobs(tiny_model(family).eval()), adapted(family)
    assert torch.equal(logprobs(model), before)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in adapter_tensors(model).values()}
    assert {p.dtype for p in adapter_tensors(model).values()} == {torch.float32}
    train_a_little(model)
    assert not torch.allclose(logprobs(model), before, atol=1e-3)


@pytest.mark.parametrize(("family", "count"), [("llama", 14), ("gpt2", 8)])
def test_without_names_every_linear_layer_but_the_head_gets_one(family: str, count: int) -> None:
    names = {name.rpartition(".lora_")[0] for name in adapter_tensors(adapted(family))}
    assert len(names) == count  # 2 blocks: 4 projections of attention and 3 of the feed-forward part; 4 in GPT-2
    assert not any("head" in name or "embed" in name or "wte" in name for name in names)


def test_chosen_names_alone_get_one() -> None:
    model = adapted(target_modules=["q_proj", "layers.1.mlp.down_proj"])
    layers = sorted({name.rpartition(".lora_")[0] for name in adapter_tensors(model)})
    assert layers == [
        f"base_model.model.model.layers.{at}" for at in ("0.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.q_proj")
    ]
    assert has_adapter(model)
    assert not has_adapter(tiny_model("llama"))


@pytest.mark.parametrize("name", ["query", "proj", "lm_head", "embed_tokens", "self_attn"])
def test_a_name_that_adapts_nothing_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        adapted(target_modules=["q_proj", name])
    problem = caught.value.problems[0]
    assert (problem.field, problem.value) == ("adapter.target_modules", name)
    assert "choose among down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in problem.remedy


def test_the_seed_alone_decides_the_start_and_no_global_number_is_drawn() -> None:
    state = torch.get_rng_state()
    first = bits(adapter_tensors(adapted(seed=3)))
    torch.manual_seed(99)
    assert same(first, bits(adapter_tensors(adapted(seed=3))))
    assert not same(first, bits(adapter_tensors(adapted(seed=4))))
    model = tiny_model("llama")
    torch.set_rng_state(state)
    add_adapter(policy_of(model), LoraAdapter(), 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_base_weights_keep_every_bit_through_fifty_syncs(family: str) -> None:
    model = adapted(family)
    base = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    before, digest = bits(base), base_hash(model)
    for _ in range(50):
        train_a_little(model)
        assert sum(tensor.numel() for _, tensor in merged_weights(model)) > 0
    assert same(before, base)
    assert base_hash(model) == digest == base_hash(tiny_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_copies_make_a_plain_model_with_the_same_log_probabilities(family: str) -> None:
    model, plain = adapted(family), tiny_model(family).eval()
    train_a_little(model, steps=5)
    merged = list(merged_weights(model))
    assert [name for name, _ in merged] == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        parameter.data = dict(merged)[name]
    assert torch.allclose(logprobs(plain), logprobs(model), atol=1e-5)


def test_the_plain_models_weights_are_its_own_tensors() -> None:
    model = tiny_model("llama")
    own = dict(model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in merged_weights(model)} == {
        name: parameter.data_ptr() for name, parameter in own.items()
    }


def test_only_one_merged_copy_lives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    copies = 0

    def count(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return tensor + other

    monkeypatch.setattr(torch.Tensor, "add_", count)
    weights = merged_weights(model)
    next(weights), next(weights), next(weights)  # the embedding, then two projections
    assert copies == 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merging_in_place_leaves_the_plain_model(family: str) -> None:
    model = adapted(family)
    train_a_little(model, steps=5)
    expected = logprobs(model)
    merge_in_place(model)
    assert not has_adapter(model)
    assert list(model.state_dict()) == list(tiny_model(family).state_dict())
    assert torch.allclose(logprobs(model), expected, atol=1e-5)


def test_with_the_adapter_off_the_base_computes_and_all_comes_back() -> None:
    model = adapted()
    train_a_little(model)
    trained, base = logprobs(model), logprobs(tiny_model("llama").eval())
    with suppress(KeyError), adapter_off(model):
        assert torch.equal(logprobs(model), base)
        with adapter_off(model):
            pass
        assert torch.equal(logprobs(model), base)
        raise KeyError
    assert torch.equal(logprobs(model), trained)
    assert all(parameter.requires_grad for parameter in adapter_tensors(model).values())


def test_a_frozen_zero_adapter_is_the_base_and_keeps_working_after_training() -> None:
    model = adapted()
    frozen = FrozenAdapter(model)
    assert frozen.is_zero
    train_a_little(model, steps=3)
    with frozen.active():
        assert torch.equal(logprobs(model), logprobs(tiny_model("llama").eval()))


def test_a_frozen_adapter_computes_as_it_did_and_the_present_one_returns_bit_for_bit() -> None:
    model = adapted()
    train_a_little(model)
    then, frozen = logprobs(model), FrozenAdapter(model)
    train_a_little(model, steps=3)
    now, tensors = logprobs(model), bits(adapter_tensors(model))
    addresses = [parameter.data_ptr() for parameter in adapter_tensors(model).values()]
    with suppress(KeyError), frozen.active():
        assert torch.equal(logprobs(model), then)
        raise KeyError
    assert torch.equal(logprobs(model), now)
    assert same(tensors, bits(adapter_tensors(model)))
    assert addresses == [parameter.data_ptr() for parameter in adapter_tensors(model).values()]


def test_a_frozen_adapter_comes_back_from_its_tensors() -> None:
    model = adapted()
    train_a_little(model)
    then, kept = logprobs(model), FrozenAdapter(model).tensors
    train_a_little(model, steps=3)
    with FrozenAdapter(model, kept).active():
        assert torch.equal(logprobs(model), then)
    with pytest.raises(CheckpointInvalid, match="belongs to another model"):
        FrozenAdapter(adapted(target_modules=["q_proj"]), kept)


def test_tensors_load_bit_for_bit_and_those_of_another_adapter_change_nothing() -> None:
    source, model = adapted(), adapted(seed=5)
    train_a_little(source)
    load_adapter_tensors(model, adapter_tensors(source))
    assert same(bits(adapter_tensors(model)), bits(adapter_tensors(source)))
    for other in (adapted(rank=8), adapted(target_modules=["q_proj"])):
        with pytest.raises(CheckpointInvalid, match="belongs to another model or adapter config"):
            load_adapter_tensors(model, adapter_tensors(other))
    assert same(bits(adapter_tensors(model)), bits(adapter_tensors(source)))


def test_the_base_hash_sees_one_changed_bit_and_no_adapter() -> None:
    model = adapted()
    assert base_hash(model) == base_hash(tiny_model("llama"))
    train_a_little(model)
    assert base_hash(model) == base_hash(tiny_model("llama"))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nextafter(model.model.norm.weight[0], torch.tensor(2.0))
    assert base_hash(model) != base_hash(tiny_model("llama"))


def test_a_bfloat16_base_gets_a_float32_adapter_and_keeps_its_type() -> None:
    model = tiny_model("llama").to(torch.bfloat16).eval()
    add_adapter(policy_of(model), LoraAdapter(rank=4), 0)
    train_a_little(model)
    assert {parameter.dtype for parameter in adapter_tensors(model).values()} == {torch.float32}
    assert {tensor.dtype for _, tensor in merged_weights(model)} == {torch.bfloat16}


def test_a_second_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="has an adapter already"):
        add_adapter(policy_of(adapted()), LoraAdapter(), 0)
