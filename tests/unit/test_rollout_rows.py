"""Both kinds of rows against plain full forwards: ragged prompts, drafts partly kept, rows that leave and come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from grpo_engine.rollout import attention, open_rows
from grpo_engine.rollout import rows as rows_module
from grpo_engine.rollout.attention import LayerCache
from grpo_engine.rollout.forward import Forward, Outputs
from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.open_rows import shared_rows_are_exact
from grpo_engine.rollout.padded_rows import PaddedRows
from grpo_engine.rollout.product_cache import ROOM_TOKENS, ProductCache
from grpo_engine.rollout.rows import Rows, SharedRows
from grpo_engine.rollout.tile_cache import TileCache
from tests.unit.tiny_models import tiny_model

SHARED = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "untied", "gemma2", "deepseek")
PADDED = (*SHARED, "bloom")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [4], [9, 3]]
KINDS = [(family, SharedRows) for family in SHARED] + [(family, PaddedRows) for family in PADDED]


class Checked:
    """Rows beside the token lists that they should hold."""

    def __init__(self, family: str, kind: Any, context: int = 64) -> None:
        self.model = tiny_model(family).eval()
        self.forward = Forward(self.model, context)
        assert shared_rows_are_exact(self.forward) == (family in SHARED)
        self.rows: Rows = kind(self.forward)
        self.held: list[list[int]] = []
        self.random = torch.Generator().manual_seed(3)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        outputs = self.rows.admit(prompts, counts)
        new = [list(prompt) for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
        self.held += new
        self.check(outputs, new, 1)

    def step(self, num_tokens: int, counts: Sequence[int] | None = None) -> None:
        fed = torch.randint(56, (len(self.held), num_tokens), generator=self.random)
        outputs = self.rows.feed(fed)
        self.check(outputs, [row + tokens for row, tokens in zip(self.held, fed.tolist(), strict=True)], num_tokens)
        kept = [num_tokens] * len(self.held) if counts is None else list(counts)
        self.rows.keep(torch.tensor(kept))
        self.held = [row + t[:n] for row, t, n in zip(self.held, fed.tolist(), kept, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self.rows.select(torch.tensor(rows, dtype=torch.long))
        self.held = [self.held[row] for row in rows]
        assert self.rows.num_rows == len(self.held)

    def check(self, outputs: Outputs, sequences: Sequence[list[int]], num_tokens: int) -> None:
        for row, tokens in enumerate(sequences):
            plain = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -num_tokens:]
            torch.testing.assert_close(outputs.logits_BQV[row], plain, rtol=1e-4, atol=1e-4)


def probed(context: int) -> Forward:
    forward = Forward(tiny_model("llama").eval(), context)
    assert shared_rows_are_exact(forward)
    return forward


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C compiler."""
    monkeypatch.setattr(attention, "is_compiled", lambda *_: False)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_logits_are_those_of_a_plain_forward(family: str, kind: Any) -> None:
    rows = Checked(family, kind)
    rows.admit(PROMPTS, [3, 1, 2])
    for _ in range(3):
        rows.step(1)
    rows.step(3, [1, 3, 2, 3, 1, 2])
    rows.select([0, 2, 3, 5])
    rows.step(2, [2, 1, 1, 2])
    rows.admit([[7, 7, 7, 7], [2, 3]], [2, 1])
    for counts in ([1, 2, 1, 1, 2, 2, 1], [2, 2, 2, 2, 2, 2, 2]):
        rows.step(2, counts)
    rows.select([3, 4, 6])
    rows.step(1)


@pytest.mark.usefixtures("products_only")
@pytest.mark.parametrize("family", SHARED)
def test_logits_by_matrix_products_alone_are_those_of_a_plain_forward(family: str) -> None:
    test_logits_are_those_of_a_plain_forward(family, SharedRows)


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_float32_is_attended_to_in_c() -> None:
    rows = Checked("llama", SharedRows)
    rows.admit([[5, 6, 7], [8, 9]], [2, 1])
    (block,) = rows.rows._blocks  # type: ignore[attr-defined]
    assert {type(layer) for layer in block.layers.values()} == {TileCache}


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_the_tokens_of_rows_that_left_are_forgotten() -> None:
    rows = Checked("llama", SharedRows)
    rows.admit([[5, 6]], [3])
    rows.step(40, [40, 2, 17])
    rows.select([1, 2])
    (block,) = rows.rows._blocks  # type: ignore[attr-defined]
    assert {layer.own.num_tokens for layer in block.layers.values()} == {32}


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_several_tiles_come_and_go(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Checked(family, SharedRows, context=256)
    # Heads are narrower than what is stored of them, and new memory may hold anything.
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, float("nan"), **kind))
    rows.admit([list(range(20)), list(range(50)) * 2], [2, 2])
    rows.step(60, [60, 2, 17, 16])
    rows.step(16, [9, 16, 1, 16])
    rows.admit([[7] * 33], [2])
    rows.step(3, [3, 2, 1, 3, 2, 1])
    rows.select([0, 2, 3, 5])
    rows.step(2)
    rows.select([1, 3])
    rows.step(1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_many_admissions_are_joined_and_stay_exact(family: str) -> None:
    rows = Checked(family, SharedRows)
    for number in range(1, 8):
        rows.admit([list(range(3, 3 + number)), [number + 1]], [2, 1])
        rows.step(1)
    assert len(rows.rows._blocks) == rows_module.MAX_BLOCKS  # type: ignore[attr-defined]
    rows.step(2)


def test_equal_prompts_of_one_admission_are_computed_once() -> None:
    rows = Checked("llama", SharedRows)
    rows.admit([[5, 6], [8, 9], [5, 6]], [1, 2, 1])
    rows.step(1)


@pytest.mark.parametrize("kind", [SharedRows, PaddedRows])
def test_completions_longer_than_what_was_reserved_go_on(kind: Any) -> None:
    rows = kind(probed(4 * ROOM_TOKENS))
    rows.admit([[5]], [1])
    for _ in range(2):
        rows.feed(torch.full((1, ROOM_TOKENS), 4))
        rows.keep(torch.tensor([ROOM_TOKENS]))
    fed = rows.feed(torch.tensor([[9, 8]])).logits_BQV[0]
    plain = rows._forward.model(torch.tensor([[5] + [4] * 2 * ROOM_TOKENS + [9, 8]])).logits[0, -2:]
    torch.testing.assert_close(fed, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("products_only")
def test_many_rows_merge_heads_and_stay_exact() -> None:
    for family in ("llama", "mistral"):
        rows = Checked(family, SharedRows)
        rows.admit([[5, 6, 7], [8]], [24, 20])
        rows.step(1)
        assert rows.rows._blocks[0].layers[0].own_keys.merge > 1  # type: ignore[attr-defined]
        rows.step(2, [1, 2] * 22)
        rows.select(list(range(0, 44, 11)))
        assert rows.rows._blocks[0].layers[0].own_keys.merge == 1  # type: ignore[attr-defined]
        rows.step(1)


def held_numbers(layer: LayerCache) -> int:
    """Of prompts' keys and values."""
    if isinstance(layer, TileCache):
        return sum(tile.numel() for tile in layer.prompts._tiles)
    assert isinstance(layer, ProductCache)
    return layer.prompt_keys.data.numel() + layer.prompt_values.data.numel()


def test_a_prompt_is_held_once_however_many_rows_continue_it() -> None:
    rows = Checked("llama", SharedRows)
    rows.admit([[5, 6, 7], [8, 9]], [20, 12])
    (block,) = rows.rows._blocks  # type: ignore[attr-defined]
    # Keys and values of 4 heads of width 8; tiles pad 3 tokens and the width to 16.
    one = 2 * 4 * (16 * 16 if isinstance(block.layers[0], TileCache) else 3 * 8)
    assert {held_numbers(layer) for layer in block.layers.values()} == {2 * one}
    rows.select([3, 4])
    (block,) = rows.rows._blocks  # type: ignore[attr-defined]
    assert {held_numbers(layer) for layer in block.layers.values()} == {one}


@pytest.mark.usefixtures("products_only")
def test_a_prompt_is_held_once_by_products() -> None:
    test_a_prompt_is_held_once_however_many_rows_continue_it()


def test_rows_must_stay_in_order() -> None:
    rows = Checked("llama", SharedRows)
    rows.admit([[5, 6]], [3])
    with pytest.raises(ValueError, match="ascending"):
        rows.rows.select(torch.tensor([1, 0]))


@pytest.mark.parametrize("kind", [SharedRows, PaddedRows])
def test_hidden_states_are_those_the_head_reads(kind: Any) -> None:
    rows = kind(probed(64))
    first = rows.admit([[5, 6], [7]], [1, 1])
    second = rows.feed(torch.tensor([[3, 4], [5, 6]]))
    for outputs in (first, second):
        read = rows._forward.model.lm_head(outputs.hidden_BQH)
        torch.testing.assert_close(read, outputs.logits_BQV, rtol=1e-6, atol=1e-6)  # products of other shapes


def test_a_model_whose_shared_prompts_are_not_exact_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_rows, "_shared_equals_plain", lambda forward: False)
    caplog.set_level("INFO", "cohort")
    assert not shared_rows_are_exact(Forward(tiny_model("llama").eval(), 64))
    assert "LlamaForCausalLM cannot share prompts" in caplog.text
