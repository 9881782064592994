from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_engine.model.mtp import CompletionSlots, MTPBlock, MTPHeads, embedded, hidden_sizes, shared_head
from tests.unit.tiny_models import tiny_model
from tests.unit.training_fixtures import assert_equal_bits, tiny_llama, weights

CPU = torch.device("cpu")
LENGTHS = [5, 1, 3]
NUM_TOKENS = sum(LENGTHS)


def heads_and_inputs(depth: int = 2, **options: object) -> tuple[MTPHeads, Tensor, Tensor]:
    """Heads of a float64 model, hidden states [N, 16] and embeddings [N, 16] of three rows."""
    model = tiny_llama(**options)
    draw = torch.Generator().manual_seed(3)
    hidden_NH, vectors_NE = torch.randn(2, NUM_TOKENS, 16, dtype=torch.float64, generator=draw)
    return MTPHeads(model, depth, seed=5), hidden_NH, vectors_NE


def run(heads: MTPHeads, hidden_NH: Tensor, vectors_NE: Tensor, lengths: list[int]) -> list[Tensor]:
    return heads(hidden_NH, vectors_NE, CompletionSlots.of(lengths, CPU))


# ---------------------------------------------------------------- the equations
def turned(vector_D: Tensor, slot: int) -> Tensor:
    """Rotary position, one pair (d, d + D / 2) at a time."""
    half = len(vector_D) // 2
    pairs = torch.complex(vector_D[:half], vector_D[half:])
    angle_F = slot * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned_F = pairs * torch.complex(angle_F.cos(), angle_F.sin())
    return torch.cat([turned_F.real, turned_F.imag])


def one_depth(block: MTPBlock, hidden_TH: Tensor, vectors_TE: Tensor) -> Tensor:
    """h^k of a row's slots from h^{k-1} and the embeddings they read, a slot and a head at a time."""
    shape = block.shape
    norms = [functional.rms_norm(x, x.shape[-1:], eps=1e-6) for x in (hidden_TH, vectors_TE)]
    stream_TH = torch.cat(norms, dim=1) @ block.combine.weight.T
    qkv = functional.rms_norm(stream_TH, (16,), eps=1e-6) @ block.qkv.weight.T
    heads = qkv.view(len(qkv), -1, shape.head_size)
    rows = []
    for slot in range(len(stream_TH)):
        attended = []
        for head in range(shape.num_heads):
            pair = shape.num_heads + head * shape.num_key_value_heads // shape.num_heads
            query = turned(heads[slot, head], slot) / shape.head_size**0.5
            scores = [query @ turned(heads[seen, pair], seen) for seen in range(slot + 1)]
            values = heads[: slot + 1, pair + shape.num_key_value_heads]
            attended.append(torch.stack(scores).softmax(0) @ values)
        rows.append(torch.cat(attended))
    stream_TH = stream_TH + torch.stack(rows) @ block.attention_output.weight.T
    gate, up = (functional.rms_norm(stream_TH, (16,), eps=1e-6) @ block.gate_up.weight.T).chunk(2, dim=1)
    return stream_TH + (functional.silu(gate) * up) @ block.down.weight.T


@pytest.mark.parametrize("pairs", [1, 2])
def test_each_depth_is_what_the_equations_say_of_one_row_alone(pairs: int) -> None:
    heads, hidden_NH, vectors_NE = heads_and_inputs(3, num_key_value_heads=pairs)
    found = run(heads, hidden_NH, vectors_NE, LENGTHS)
    row = slice(6, 9)
    hidden_TH, vectors_TE = hidden_NH[row], vectors_NE[row]
    for block, features_NH in zip(heads.each(), found, strict=True):
        hidden_TH = one_depth(block, hidden_TH, vectors_TE)
        expected = functional.rms_norm(hidden_TH, (16,), block.output_norm.weight, 1e-6)
        real = len(vectors_TE)
        torch.testing.assert_close(features_NH[row][:real], expected, rtol=1e-9, atol=1e-9)
        hidden_TH, vectors_TE = hidden_TH[: real - 1], vectors_TE[1:]


def test_a_slot_sees_the_tokens_up_to_its_depth_and_none_beyond() -> None:
    heads, hidden_NH, vectors_NE = heads_and_inputs(3)
    before = run(heads, hidden_NH, vectors_NE, LENGTHS)
    vectors_NE[3] += 1  # token 3 of the first row
    after = run(heads, hidden_NH, vectors_NE, LENGTHS)
    changed = [[bool((a[slot] != b[slot]).any()) for slot in range(5)] for a, b in zip(before, after, strict=True)]
    assert changed[0] == [False, False, False, True, True]
    assert changed[1][:4] == [False, False, True, True]
    assert changed[2][:3] == [False, True, True]


def test_rows_do_not_see_each_other() -> None:
    heads, hidden_NH, vectors_NE = heads_and_inputs(2)
    together = run(heads, hidden_NH, vectors_NE, LENGTHS)
    alone = run(heads, hidden_NH[6:], vectors_NE[6:], [3])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one[6:8], other[:2], rtol=1e-12, atol=1e-12)


def test_slots_that_predict_a_token_are_those_with_enough_tokens_behind_them() -> None:
    slots = CompletionSlots.of([4, 0, 1, 2], CPU)
    assert [slots.scored(depth).tolist() for depth in (1, 2, 3, 4)] == [[0, 1, 2, 5], [0, 1], [0], []]
    assert slots.position_N.tolist() == [0, 1, 2, 3, 0, 0, 1]


# ---------------------------------------------------------------- beside a policy
def test_making_heads_changes_neither_the_policy_nor_the_global_random_state() -> None:
    model = tiny_llama().train()
    before, state = weights(model), torch.get_rng_state()
    heads = MTPHeads(model, 2, seed=1)
    assert_equal_bits(before, weights(model))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not {id(p) for p in model.parameters()} & {id(p) for p in heads.parameters()}


def test_the_seed_decides_the_weights() -> None:
    model = tiny_llama()
    one, same, other = (weights(MTPHeads(model, 2, seed)) for seed in (1, 1, 2))
    assert_equal_bits(one, same)
    assert not torch.equal(one["blocks.1.qkv.weight"], other["blocks.1.qkv.weight"])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
def test_heads_fit_models_of_other_families(family: str) -> None:
    model = tiny_model(family)
    heads = MTPHeads(model, 1, seed=0)
    tokens_N = torch.arange(NUM_TOKENS)
    features = run(heads, torch.randn(NUM_TOKENS, 32), embedded(model, tokens_N), LENGTHS)[0]
    head = shared_head(model)
    output: nn.Linear = model.get_output_embeddings()
    assert torch.equal(head(features), output(features))
    assert not head.weight.requires_grad
    assert heads.each()[0].shape.num_key_value_heads == getattr(model.config, "num_key_value_heads", 4)


def test_features_begin_at_the_size_of_the_policys_hidden_states() -> None:
    model = tiny_llama()
    model.model.norm.weight.data.mul_(7)
    sizes_H = hidden_sizes(model)
    assert 3 < float(sizes_H.mean()) < 14
    assert torch.equal(MTPHeads(model, 1, seed=0).each()[0].output_norm.weight, sizes_H)


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 0 must be at least 1"):
        MTPHeads(tiny_llama(), 0, seed=0)
