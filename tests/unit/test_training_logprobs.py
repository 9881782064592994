from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from grpo_engine.model.logprobs import LogprobForward, head_is_separate
from grpo_engine.model.packing import collate
from grpo_engine.types import TrainRow
from tests.unit.training_fixtures import VOCABULARY, ragged_rows, tiny_llama

CPU = torch.device("cpu")


def naive(model: PreTrainedModel, row: TrainRow, temperature: float) -> list[tuple[float, float, float, bool]]:
    """policy, full, entropy, correct of each token: one row at a time, no padding, plain Python arithmetic."""
    with torch.no_grad():
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].double().tolist()
    out = []
    for t, token in enumerate(row.completion_ids):
        scaled = [x / temperature for x in logits[len(row.prompt_ids) - 1 + t]]
        kept = range(len(scaled)) if row.kept_ids is None else row.kept_ids[t]
        full_norm = math.log(math.fsum(math.exp(x) for x in scaled))
        kept_norm = math.log(math.fsum(math.exp(scaled[k]) for k in kept))
        entropy = -math.fsum(math.exp(x - full_norm) * (x - full_norm) for x in scaled)
        out.append((scaled[token] - kept_norm, scaled[token] - full_norm, entropy, token == scaled.index(max(scaled))))
    return out


def assert_matches_naive(model: PreTrainedModel, rows: list[TrainRow], temperature: float, tolerance: float) -> None:
    forward = LogprobForward(model)
    got = forward(collate(rows, packed=forward.packed, device=CPU), temperature)
    expected = [values for row in rows for values in naive(model, row, temperature)]
    for column, tensor in enumerate((got.policy, got.full, got.entropy, got.correct)):
        assert tensor.tolist() == pytest.approx([values[column] for values in expected], abs=tolerance)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_number_equals_plain_arithmetic_row_by_row(kept: bool, temperature: float) -> None:
    assert_matches_naive(tiny_llama(), ragged_rows(kept=kept), temperature, 1e-10)


def gemma2() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, initializer_range=0.3, final_logit_softcapping=2.0))


def cohere() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return CohereForCausalLM(CohereConfig(**sizes, num_attention_heads=2, logit_scale=0.25, initializer_range=0.3))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64))


@pytest.mark.parametrize(("build", "separate"), [(gemma2, False), (cohere, False), (gpt2, True)])
def test_other_architectures_agree_with_their_own_logits(build: object, separate: bool) -> None:
    torch.manual_seed(0)
    model = build().eval()
    assert head_is_separate(model) is separate
    assert_matches_naive(model, ragged_rows(), 0.7, 1e-5)


def test_padding_width_and_pad_id_change_nothing() -> None:
    forward, rows = LogprobForward(tiny_llama()), ragged_rows()
    narrow = forward(collate(rows, packed=False, device=CPU), 1.0)
    wide = forward(collate(rows, packed=False, pad_token_id=5, device=CPU, pad_to=40), 1.0)
    assert wide.policy.tolist() == pytest.approx(narrow.policy.tolist(), abs=1e-12)
    assert wide.entropy.tolist() == pytest.approx(narrow.entropy.tolist(), abs=1e-12)


def test_pad_and_end_tokens_inside_a_completion_are_scored_like_any_other() -> None:
    row = TrainRow([4, 5], [0, 0, 1, 0, 1])
    assert_matches_naive(tiny_llama(), [row, *ragged_rows(3)], 1.0, 1e-10)


def test_chunks_change_neither_values_nor_gradients() -> None:
    rows = ragged_rows(kept=True)
    gradients = []
    for chunk_elements in (10**6, 3 * VOCABULARY):
        model = tiny_llama()
        out = LogprobForward(model, chunk_elements=chunk_elements)(collate(rows, packed=True, device=CPU), 0.7)
        (out.policy * out.full).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_log_softmax_is_float32_when_the_model_computes_in_bfloat16() -> None:
    out = LogprobForward(tiny_llama(dtype=torch.float32), dtype="bfloat16")(
        collate(ragged_rows(), packed=True, device=CPU), 1.0
    )
    assert out.policy.dtype == out.entropy.dtype == torch.float32
    exact = LogprobForward(tiny_llama(dtype=torch.float32))(collate(ragged_rows(), packed=True, device=CPU), 1.0)
    assert 0 < (out.policy - exact.policy).abs().max() < 0.1


def test_kept_log_probabilities_sum_to_one_over_the_kept_set() -> None:
    kept = [2, 7, 11]
    rows = [TrainRow([4, 5], [token], kept_ids=[kept]) for token in kept]
    out = LogprobForward(tiny_llama())(collate(rows, packed=True, device=CPU), 1.0)
    assert out.policy.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert out.full.exp().sum().item() < 0.99


@pytest.mark.parametrize("packed", [True, False])
def test_no_completion_token_gives_empty_results(packed: bool) -> None:
    forward = LogprobForward(tiny_llama())
    out = forward(collate([TrainRow([3, 4], [])], packed=packed, device=CPU), 1.0)
    assert out.policy.shape == out.correct.shape == (0,)
    assert forward.features(collate([], packed=packed, device=CPU)).shape == (0, 16)


def test_features_are_what_the_head_reads() -> None:
    forward = LogprobForward(model := tiny_llama())
    out = forward(batch := collate(ragged_rows(), packed=True, device=CPU), 1.0)
    assert out.features is not None
    full = model.lm_head(out.features).log_softmax(1).gather(1, batch.target_N[:, None])[:, 0]
    torch.testing.assert_close(out.full, full, rtol=1e-12, atol=1e-12)
    out.features.retain_grad()
    out.policy.sum().backward()
    assert out.features.grad is not None


def test_models_without_a_separate_head_have_features_for_a_critic_and_none_in_scores() -> None:
    torch.manual_seed(0)
    forward, batch = LogprobForward(gemma2()), collate(ragged_rows(), packed=False, device=CPU)
    assert forward(batch, 1.0).features is None
    assert forward.features(batch).shape == (len(batch.target_N), 16)


@pytest.mark.parametrize("build", [gemma2, tiny_llama])
def test_entropy_has_the_gradient_of_plain_entropy_when_asked(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model, row = build(), TrainRow([4, 5], [6, 7, 2])
    forward = LogprobForward(model)
    batch = collate([row], packed=forward.packed, device=CPU)
    forward(batch, 0.7, entropy_gradient=True).entropy.sum().backward()
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    log_p = (model(torch.tensor([[4, 5, 6, 7]])).logits[0, 1:] / 0.7).log_softmax(1)
    (-(log_p.exp() * log_p).sum()).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        LogprobForward(tiny_llama())(collate(ragged_rows(1), packed=True, device=CPU), 0.0)
