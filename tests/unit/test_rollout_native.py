"""Attention in C against sums written out in float64, and what becomes of a machine that cannot compile it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_engine.rollout.arrangement import Arrangement
from grpo_engine.rollout.native import attend as native_attend
from grpo_engine.rollout.native import compiled
from grpo_engine.rollout.native.attend import is_compiled
from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.native.layer import InC
from grpo_engine.rollout.tile_cache import TileCache, Tiles

needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler")
CPU = torch.device("cpu")
HELD, PROMPT, SLOT = (0, 14, 135, 64, 63), [2, 130], [0, 0, 1, 1, 1]
"""Five rows of two prompts. Softmax takes 64 tokens at once, tiles hold 16."""
FULL = (16, 3, 128, 64, 0)
"""The longest row has filled its tiles."""
ROOM = 160
SCALE = 0.3
NAN = float("nan")
FINITE = 1e4
"""Memory that was used before holds numbers like any others."""


class Case:
    """2 key-value heads, each of `group` query heads, `num_new` tokens a row."""

    def __init__(
        self, width: int = 32, group: int = 1, num_new: int = 1, window: int | None = None,
        held: tuple[int, ...] = HELD, garbage: float = NAN,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        self.num_new, self.group, self.window = num_new, group, window
        self.held, self.garbage = held, garbage
        # As layers give them: the heads of a token are neighbours.
        self.queries = normal(5, num_new, 2 * group, width).transpose(1, 2)
        self.new_keys, self.new_values = (normal(5, num_new, 2, width).transpose(1, 2) for _ in range(2))
        self.keys, self.values = normal(2, 5, ROOM, width), normal(2, 5, ROOM, width)
        self.prompt_keys, self.prompt_values = normal(2, 2, 130, width), normal(2, 2, 130, width)

    def run(self) -> Tensor:
        """[B, Q, heads, width]. What lies behind a row's or a prompt's tokens is garbage and must not matter."""
        rows = Arrangement(np.array(PROMPT), np.array(SLOT), np.array(self.held), CPU)
        rows.begin(self.num_new)
        prompts, own = (
            Tiles.filled(*(_with_garbage(states, lengths, self.garbage) for states in pair))
            for pair, lengths in (
                ((self.prompt_keys, self.prompt_values), PROMPT),
                ((self.keys, self.values), self.held),
            )
        )
        self.cache = TileCache(prompts, own)
        new = (self.queries, self.new_keys, self.new_values)
        return self.cache.attend(rows, *new, SCALE, self.window)

    def expected(self, row: int, head: int, new: int) -> Tensor:
        """The same of one query, float64."""
        slot, at, held = SLOT[row], head // self.group, self.held[row]
        keys, values = (
            torch.cat([prompt[at, slot, : PROMPT[slot]], own[at, row, :held], fed[row, at, : new + 1]]).double()
            for prompt, own, fed in (
                (self.prompt_keys, self.keys, self.new_keys), (self.prompt_values, self.values, self.new_values)
            )
        )  # fmt: skip
        seen = len(keys) if self.window is None else min(self.window, len(keys))
        weights = torch.softmax(keys[-seen:] @ self.queries[row, head, new].double() * SCALE, 0)
        return weights @ values[-seen:]


def _with_garbage(states_HBTD: Tensor, lengths: Sequence[int], garbage: float) -> Tensor:
    states = states_HBTD.clone()
    for sequence, length in enumerate(lengths):
        states[:, sequence, length:] = garbage
    return states


def check(case: Case, rtol: float = 1e-5) -> None:
    out = case.run()
    for row in range(5):
        for head in range(2 * case.group):
            for new in range(case.num_new):
                expected = case.expected(row, head, new)
                torch.testing.assert_close(out[row, new, head].double(), expected, rtol=rtol, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("width", [8, 20, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("group", "num_new"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_attention_is_the_softmax_over_prompt_and_own_tokens(width: int, group: int, num_new: int) -> None:
    check(Case(width, group, num_new))
    check(Case(width, group, num_new, held=FULL, garbage=FINITE))


@needs_compiler
@pytest.mark.parametrize("window", [1, 2, 40, 66, 131, 150, 1000])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_sliding_window_cuts_off_the_earliest_tokens(window: int, num_new: int) -> None:
    check(Case(group=2, num_new=num_new, window=window))


@needs_compiler
@pytest.mark.parametrize("held", [HELD, FULL])
def test_new_tokens_are_written_behind_those_held(held: tuple[int, ...]) -> None:
    case = Case(width=20, num_new=3, held=held)
    check(case)
    for row, held_tokens in enumerate(held):
        for new in range(3):
            keys, values = written(case.cache.own, row, held_tokens + new, 20)
            torch.testing.assert_close(keys, case.new_keys[row, :, new], rtol=0, atol=0)
            torch.testing.assert_close(values, case.new_values[row, :, new], rtol=0, atol=0)


def written(tiles: Tiles, sequence: int, token: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a token, [heads, width]."""
    tile = tiles._tiles[token // 16][sequence]
    keys, values = tile[:, 0].view(2, -1, 16)[:, :, token % 16], tile[:, 1].view(2, 16, -1)[:, token % 16]
    return keys[:, :width], values[:, :width]


class Watched:
    """The library, and the rows that it was asked for."""

    def __init__(self, result: int = 0) -> None:
        self.parts = list[tuple[int, int]]()
        self._result = result

    def attend(self, work: Any, begin: int, end: int) -> int:
        self.parts.append((begin, end))
        native = library()
        assert native is not None
        return self._result or int(native.attend(work, begin, end))


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(("few", "parts"), [(0, [(0, 1), (1, 3), (3, 5)]), (1 << 30, [(0, 5)])])
def test_rows_are_divided_among_threads_where_there_is_much_to_read(
    few: int, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    monkeypatch.setattr(native_attend, "library", lambda: watched)
    monkeypatch.setattr(native_attend, "FEW_NUMBERS", few)
    check(Case(group=2))
    assert sorted(watched.parts) == parts


@needs_compiler
def test_a_lack_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_attend, "library", lambda: Watched(result=1))
    with pytest.raises(MemoryError, match="5 rows, 2 heads of width 32"):
        Case().run()


@needs_compiler
@pytest.mark.parametrize("which", ["queries", "new_keys", "new_values"])
def test_other_types_never_reach_the_loops(which: str) -> None:
    case = Case()
    setattr(case, which, getattr(case, which).bfloat16())
    with pytest.raises(TypeError, match="bfloat16"):
        case.run()


@needs_compiler
@pytest.mark.parametrize("size", [100.0, 1e-4])
def test_scores_beyond_the_exponentials_range_are_taken_from_the_largest(size: float) -> None:
    case = Case(num_new=2)
    case.queries *= size
    check(case, rtol=1e-3)


@needs_compiler
def test_scores_far_below_zero_are_taken_from_the_largest_too() -> None:
    case = Case(num_new=2)
    case.queries = case.queries.abs() + 0.5
    case.keys, case.new_keys, case.prompt_keys = (
        -12 * (keys.abs() + 0.5) for keys in (case.keys, case.new_keys, case.prompt_keys)
    )
    check(case, rtol=1e-3)


@needs_compiler
def test_states_may_lie_in_any_order() -> None:
    case = Case(num_new=3)
    case.queries = case.queries.transpose(2, 3).contiguous().transpose(2, 3)
    case.new_values = case.new_values.transpose(0, 2).contiguous().transpose(0, 2)
    check(case)


@needs_compiler
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_weights_add_up_to_one(size: float) -> None:
    case = Case(group=2, num_new=2)
    case.queries *= size
    case.values, case.new_values, case.prompt_values = (
        torch.ones_like(values) for values in (case.values, case.new_values, case.prompt_values)
    )
    out = case.run()
    torch.testing.assert_close(out, torch.ones_like(out))


@needs_compiler
@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("where", ["queries", "new_keys", "new_values"])
def test_what_is_not_finite_is_not_hidden(poison: float, where: str) -> None:
    """A model that has diverged must be noticed by its log-probabilities."""
    case = Case(num_new=2)
    getattr(case, where)[1] = poison
    out = case.run()
    assert not out[1].isfinite().any()
    assert out[[0, 2, 3, 4]].isfinite().all()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's extensions")
@pytest.mark.parametrize("without", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mno-avx")])
def test_processors_with_narrower_registers_compute_the_same(
    without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *without, "-Wall", "-Wextra", "-Werror"))
    narrower = compiled.library.__wrapped__()
    assert narrower is not None
    monkeypatch.setattr(native_attend, "library", lambda: narrower)
    for width, window in ((20, None), (96, 40)):
        check(Case(width, 2, 3, window))
    gate, up = torch.linspace(-30, 30, 37), torch.linspace(1, 2, 37)
    torch.testing.assert_close(InC(narrower).gated(gate.clone(), up), torch.nn.functional.silu(gate) * up)


@needs_compiler
def test_only_float32_on_the_processor_is_compiled() -> None:
    assert is_compiled(torch.float32, CPU)
    assert not is_compiled(torch.bfloat16, CPU)
    assert not is_compiled(torch.float32, torch.device("cuda"))


# ---------------------------------------------------------------- compiling
@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has not asked yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    return tmp_path / "cohort"


@needs_compiler
def test_the_library_is_compiled_once_and_kept(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.library() is not None
    (kept,) = machine.iterdir()
    made = kept.stat().st_mtime_ns
    assert compiled.library() is not None
    assert [(each, each.stat().st_mtime_ns) for each in machine.iterdir()] == [(kept, made)]
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-DOTHER"))
    assert compiled.library() is not None
    assert len(list(machine.iterdir())) == 2


@needs_compiler
def test_without_a_folder_to_keep_it_in_it_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled.library.__wrapped__() is not None


def test_a_machine_without_a_compiler_is_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(machine))
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level("INFO", "cohort")
    assert compiled.library() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_told_with_its_reason(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.mkdir()
    script = machine / "compiler"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no space left" >&2; exit 1; }\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert compiled.library() is None
    assert "matrix products: no space left" in caplog.text


def test_the_switch_turns_it_off(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.library() is None
    assert not machine.exists()
