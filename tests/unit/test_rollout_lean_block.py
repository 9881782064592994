"""A heads' block written out for drafting against the block that trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_engine.model.mtp import MTPBlock, MTPHeads
from grpo_engine.rollout import lean_block
from grpo_engine.rollout.lean_block import LeanBlock
from grpo_engine.rollout.native.compiled import library
from tests.unit.training_fixtures import tiny_llama


def heads(**options: object) -> MTPHeads:
    """With norms unlike each other, as training leaves them."""
    made = MTPHeads(tiny_llama(**options).float(), 1, seed=1).float()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.3, 1.7)
    return made


def computed(block: MTPBlock | LeanBlock, made: MTPHeads, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Everything a block gives for 3 rows, its attention being the queries' own values."""
    random, shape = torch.Generator().manual_seed(num_tokens), made.each()[0].shape
    hidden = torch.randn(3, num_tokens, shape.hidden, generator=random).to(dtype)
    embedded = torch.randn(3, num_tokens, shape.embedding, generator=random).to(dtype)
    given = (hidden.clone(), embedded.clone())
    rotation = made.rotation(torch.arange(3 * num_tokens).view(3, num_tokens))
    stream, queries, keys, values = block.before_attention(hidden, embedded, rotation)
    attended = queries + values.repeat_interleave(shape.num_heads // shape.num_key_value_heads, dim=2)
    new = block.after_attention(stream, attended)
    assert torch.equal(hidden, given[0])  # other blocks read them, too
    assert torch.equal(embedded, given[1])
    return [stream, queries, keys, values, new, block.features(new[:, -1])]


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("pairs", [1, 2])
@torch.no_grad()
def test_it_computes_what_the_block_computes(num_tokens: int, pairs: int) -> None:
    made = heads(num_key_value_heads=pairs)
    (block,) = made.each()
    written_out = LeanBlock(block)
    assert written_out._steps(torch.zeros(1)) is not None
    ours, theirs = (computed(each, made, num_tokens, torch.float32) for each in (written_out, block))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_types_autocast_and_machines_without_a_compiler_use_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made = heads()
    (block,) = made.each()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert LeanBlock(block)._steps(torch.zeros(1)) is None
    assert LeanBlock(block)._steps(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)) is None
    monkeypatch.setattr(lean_block.InC, "for_states", staticmethod(lambda states: None))
    ours, theirs = (computed(each, made, 2, torch.float32) for each in (LeanBlock(block), block))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)
    (wide,) = MTPHeads(tiny_llama().double(), 1, seed=1).double().each()
    assert LeanBlock(wide)._steps(torch.zeros(1)) is None
