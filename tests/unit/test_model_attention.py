from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, PreTrainedModel

from grpo_engine.config import SamplingConfig
from grpo_engine.model.attention import IMPLEMENTATION, use_packed_attention, use_plain_attention
from grpo_engine.model.logprobs import LogprobForward, packing_is_exact
from grpo_engine.model.packing import collate, micro_batches
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import SampleRequest, TrainRow
from tests.unit.tiny_models import TOKENIZER, tiny_model

CPU = torch.device("cpu")
FAMILIES = ["llama", "mistral", "qwen2", "gpt2"]
"""Mistral: a window of 6 in every layer and grouped queries; Qwen 2: of 5 in one of two layers."""


def ragged(seed: int = 0) -> list[TrainRow]:
    """Rows with shared prompts, prompts and completions of one token, and rows longer than every window."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 50) for _ in range(count)]

    shared, single = tokens(5), tokens(1)
    rows = [TrainRow(shared, tokens(n)) for n in (9, 1, 20, 2)] + [TrainRow(single, tokens(n)) for n in (1, 12)]
    return [*rows, TrainRow(tokens(1), tokens(1)), TrainRow(tokens(7), tokens(30)), TrainRow(tokens(3), [])]


def outcome(model: PreTrainedModel, batches: list[list[TrainRow]], **how: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Hidden states, log-probabilities and gradients of a loss over all batches, in row order."""
    forward = LogprobForward(model)
    model.zero_grad()
    results = [forward(collate(rows, device=CPU, **how), 0.7, entropy_gradient=True) for rows in batches]
    policy = torch.cat([result.policy for result in results])
    entropy = torch.cat([result.entropy for result in results])
    (policy.sin().sum() + 0.1 * entropy.sum()).backward()
    features = torch.cat([result.features for result in results if result.features is not None])
    return features.detach(), policy.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(one: tuple[Tensor, Tensor, list[Tensor]], other: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    for ours, expected in zip([*one[:2], *one[2]], [*other[:2], *other[2]], strict=True):
        # Llama's norms compute in float32 whatever the model's type: that noise, and not 1e-12.
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_padded_rows_equal_single_rows(family: str) -> None:
    model, rows = tiny_model(family).double(), ragged()
    assert LogprobForward(model).packed
    packed = outcome(model, [rows], packed=True)
    assert_same(packed, outcome(model, [rows], packed=False))
    assert_same(packed, outcome(model, [[row] for row in rows], packed=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_prompts_changes_nothing(family: str) -> None:
    """One row a batch shares nothing."""
    model, rows = tiny_model(family).double(), ragged(1)
    assert_same(outcome(model, [rows], packed=True), outcome(model, [[row] for row in rows], packed=True))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_row_order_padding_width_and_token_limit_change_nothing(family: str) -> None:
    model, rows = tiny_model(family).double(), ragged(2)
    expected = outcome(model, [rows], packed=True)
    assert_same(outcome(model, [rows], packed=False, pad_to=50, pad_token_id=9), expected)
    for limit in (1, 25, 60):
        batches = micro_batches(rows, limit)
        order = [index for batch in batches for index in batch]
        straight = outcome(model, [[rows[index] for index in order]], packed=True)
        assert_same(outcome(model, [[rows[index] for index in batch] for batch in batches], packed=True), straight)
        assert_same((*expected[:2], straight[2]), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_one_completion_token(packed: bool) -> None:
    model = tiny_model("llama").double()
    rows = [TrainRow([5], [7]), TrainRow([5], [8]), TrainRow([6], [7])]
    logits = torch.cat([model(torch.tensor([row.prompt_ids])).logits[0, -1:] for row in rows])
    out = LogprobForward(model)(collate(rows, device=CPU, packed=packed), 1.0)
    expected = logits.log_softmax(1)[torch.arange(3), torch.tensor([7, 8, 7])]
    torch.testing.assert_close(out.policy, expected, rtol=1e-6, atol=1e-6)


def test_dense_layers_see_no_padding_and_shared_prompts_once() -> None:
    model, rows, seen = tiny_model("llama"), ragged(), []
    forward = LogprobForward(model)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    forward.features(collate(rows, device=CPU, packed=True))
    prompts = 5 + 1 + 1 + 7
    assert seen == [(1, prompts + sum(len(row.completion_ids) - 1 for row in rows if row.completion_ids))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_on_the_same_module_samples_as_before(family: str) -> None:
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.0)
    requests = [SampleRequest(prompt, (i,), "g") for i, prompt in enumerate([[5, 6, 7, 8, 9, 10, 11, 12], [4], [9, 3]])]
    model = tiny_model(family)
    plain = TorchSampler(copy.deepcopy(model), TOKENIZER, [2], 64).sample(requests, sampling)
    assert LogprobForward(model).packed
    assert TorchSampler(model, TOKENIZER, [2], 64).sample(requests, sampling) == plain


def test_bfloat16_stays_near_float32() -> None:
    model, rows = tiny_model("mistral"), ragged()
    batch = collate(rows, device=CPU, packed=True)
    exact, rounded = (LogprobForward(model, dtype=dtype)(batch, 1.0) for dtype in ("float32", "bfloat16"))
    assert 0 < (exact.policy - rounded.policy).abs().mean() < 0.1
    rounded.policy.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_saved_models_load_elsewhere_as_ever(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert packing_is_exact(model)
    model.save_pretrained(tmp_path)
    assert IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    assert "attn" not in json.dumps(sorted(json.loads((tmp_path / "config.json").read_text())))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_copy_of_a_packed_model_is_packed() -> None:
    model = tiny_model("qwen2")
    LogprobForward(model)
    assert LogprobForward(copy.deepcopy(model)).packed


def bloom() -> PreTrainedModel:
    """ALiBi: biases that the attention function never hears of."""
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.3))


def foreign() -> PreTrainedModel:
    """Takes in the state of the token before, without asking the attention function."""
    model = tiny_model("llama")

    def shift(_: Any, __: Any, states: Tensor) -> Tensor:
        return states + 0.5 * torch.nn.functional.pad(states, (0, 0, 1, -1))

    model.model.layers[1].register_forward_hook(shift)
    return model


def hidden_window() -> PreTrainedModel:
    """Its window is in its masks alone, and wider than any probe."""
    model = tiny_model("mistral")
    model.config.sliding_window = 40
    assert use_packed_attention(model)
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = None
    use_plain_attention(model)
    return model


@pytest.mark.parametrize("build", [bloom, foreign, hidden_window])
def test_models_that_packing_would_change_are_padded(build: Any) -> None:
    model, rows = build(), ragged()
    forward = LogprobForward(model)
    assert not forward.packed
    assert model.config._attn_implementation != IMPLEMENTATION
    out = forward(collate(rows, device=CPU, packed=False), 1.0)
    for row, values in zip(rows, out.full.split([len(row.completion_ids) for row in rows]), strict=True):
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(1).gather(1, torch.tensor(row.completion_ids, dtype=torch.long)[:, None])[:, 0]
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


def test_packing_asked_of_a_model_that_cannot_is_refused() -> None:
    with pytest.raises(ValueError, match="BloomForCausalLM cannot compute packed rows exactly"):
        LogprobForward(bloom(), packed=True)


def test_a_second_forward_whose_probe_fails_leaves_the_first_ones_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama"), collate(ragged(), device=CPU, packed=True)
    first = LogprobForward(model)
    expected = first(batch, 1.0).policy
    monkeypatch.setattr("grpo_engine.model.logprobs.PROBE_TOLERANCE", -1.0)
    assert not LogprobForward(model).packed
    assert torch.equal(first(batch, 1.0).policy, expected)


def test_memory_that_runs_out_in_the_probe_is_no_reason_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: PreTrainedModel) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("grpo_engine.model.logprobs._packed_equals_padded", fail)
    with pytest.raises(torch.OutOfMemoryError):
        LogprobForward(model := tiny_model("llama"))
    assert model.config._attn_implementation == "sdpa"


def test_padding_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cohort")
    LogprobForward(tiny_model("llama"))
    assert caplog.messages == []
    LogprobForward(bloom())
    assert caplog.messages == ["BloomForCausalLM cannot compute packed rows exactly: rows are padded, which is slower"]


def test_eager_models_keep_their_attention() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    assert not use_packed_attention(model)
    assert model.config._attn_implementation == "eager"


def test_packing_can_be_declined() -> None:
    assert not LogprobForward(tiny_model("llama"), packed=False).packed
