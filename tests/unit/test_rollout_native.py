"""Attention in C against sums written out in float64, and what becomes of a machine that cannot compile it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_engine.rollout.native import attend as native_attend
from grpo_engine.rollout.native import compiled
from grpo_engine.rollout.native.attend import WIDTHS, attend, is_compiled
from grpo_engine.rollout.native.compiled import library

needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler")
HELD, PROMPT, PLACE = [0, 3, 40, 7], [2, 2, 5, 5], [0, 2, 3, 4]
"""Four rows of two prompts with three places each; two places are empty."""
SCALE = 0.3


class Case:
    """2 key-value heads, each of `group` query heads, `num_new` tokens a row."""

    def __init__(self, width: int = 32, group: int = 1, num_new: int = 1) -> None:
        random = torch.Generator().manual_seed(width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        self.num_new = num_new
        self.queries = normal(4, 2, group * num_new, width)
        # As layers give them: the heads of a token are neighbours.
        self.new_keys, self.new_values = (normal(4, num_new, 2, width).transpose(1, 2) for _ in range(2))
        self.keys, self.values = normal(4, 2, 64, width), normal(4, 2, 64, width)
        self.shared = normal(2, 2, 3, group * num_new, 5)

    def run(self) -> tuple[Tensor, Tensor]:
        """(attention to own tokens, weights of the prompt)."""
        weights = self.shared.clone()
        held, prompt, place = (torch.tensor(each) for each in (HELD, PROMPT, PLACE))
        new = (self.new_keys, self.new_values)
        return attend(
            self.queries, *new, self.keys.clone(), self.values.clone(), held, prompt, place, weights, SCALE
        ), weights

    def expected(self, row: int, head: int, query: int) -> tuple[Tensor, Tensor]:
        """The same of one query, float64."""
        seen, slot, place = query % self.num_new + 1, PLACE[row] // 3, PLACE[row] % 3
        keys, values = (
            torch.cat([old[row, head, : HELD[row]], new[row, head, :seen]]).double()
            for old, new in ((self.keys, self.new_keys), (self.values, self.new_values))
        )
        prompt = self.shared[slot, head, place, query, : PROMPT[row]].double()
        weights = torch.softmax(torch.cat([prompt, keys @ self.queries[row, head, query].double() * SCALE]), 0)
        return weights[PROMPT[row] :] @ values, weights[: PROMPT[row]]


def check(case: Case, rtol: float = 1e-5) -> None:
    out, weights = case.run()
    for row in range(4):
        slot, place = PLACE[row] // 3, PLACE[row] % 3
        for head in range(2):
            for query in range(case.queries.shape[2]):
                own, shared = case.expected(row, head, query)
                found = weights[slot, head, place, query]
                torch.testing.assert_close(out[slot, head, place, query].double(), own, rtol=rtol, atol=1e-6)
                torch.testing.assert_close(found[: PROMPT[row]].double(), shared, rtol=rtol, atol=1e-7)
                assert not found[PROMPT[row] :].any()


@needs_compiler
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("group", "num_new"), [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_attention_is_the_softmax_over_prompt_and_own_tokens(width: int, group: int, num_new: int) -> None:
    check(Case(width, group, num_new))


@pytest.fixture
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native_attend, "FEW_NUMBERS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("_three_threads")
def test_rows_divided_among_threads_come_out_the_same() -> None:
    check(Case(group=2))


@needs_compiler
@pytest.mark.parametrize("lift", [200.0, -200.0])
def test_scores_beyond_the_exponentials_range_are_taken_from_the_largest(lift: float) -> None:
    case = Case()
    case.queries *= 30
    case.shared = case.shared * 30 + lift
    check(case, rtol=1e-4)


@needs_compiler
def test_new_keys_and_values_may_lie_in_any_order() -> None:
    case = Case(num_new=3)
    case.new_keys, case.new_values = (
        new.transpose(2, 3).contiguous().transpose(2, 3) for new in (case.new_keys, case.new_values)
    )
    check(case)


@needs_compiler
def test_places_without_a_row_stay_zero() -> None:
    out, _ = Case().run()
    assert not out[0, :, 1].any()
    assert not out[1, :, 2].any()


@needs_compiler
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_scores_of_any_size_give_weights_that_add_up_to_one(size: float) -> None:
    case = Case()
    case.queries *= size
    case.shared *= size
    case.values, case.new_values = torch.ones_like(case.values), torch.ones_like(case.new_values)
    out, weights = case.run()
    total = out[..., 0] + weights.sum(-1)
    rows = torch.stack([total[place // 3, :, place % 3] for place in PLACE])
    torch.testing.assert_close(rows, torch.ones_like(rows))


@needs_compiler
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(poison: float) -> None:
    """A model that has diverged must be noticed by its log-probabilities."""
    case = Case()
    case.queries[1] = poison
    out, _ = case.run()
    assert out[0, :, 2].isnan().all()
    assert out[0, :, 0].isfinite().all()


@needs_compiler
def test_only_float32_on_the_processor_in_known_widths_is_compiled() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert is_compiled(32, torch.float32, cpu)
    assert not is_compiled(33, torch.float32, cpu)
    assert not is_compiled(32, torch.bfloat16, cpu)
    assert not is_compiled(32, torch.float32, cuda)


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
