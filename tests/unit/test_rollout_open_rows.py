"""The probe that decides how a model is decoded: what it must notice, what it must forgive, what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grpo_engine.model.attention import has_packed_attention, use_packed_attention
from grpo_engine.rollout import lean, open_rows
from grpo_engine.rollout.forward import Forward, Outputs
from grpo_engine.rollout.open_rows import shared_rows_are_exact
from grpo_engine.rollout.rows import SharedRows
from tests.unit.tiny_models import WIDTHS, tiny_model

EXACT = open_rows._shared_equals_plain


def probed(model: PreTrainedModel) -> tuple[bool, Forward]:
    forward = Forward(model.eval(), 64)
    return shared_rows_are_exact(forward), forward


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, method: Callable[..., Any]) -> None:
    monkeypatch.setattr(SharedRows, name, method)


# ---------------------------------------------------------------- what it must notice
def test_rows_that_keep_a_refused_draft_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = SharedRows.keep
    replaced(monkeypatch, "keep", lambda self, counts: keep(self, torch.full_like(counts, 2)))
    assert not probed(tiny_model("llama"))[0]


def test_rows_that_lose_a_kept_draft_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = SharedRows.keep
    replaced(monkeypatch, "keep", lambda self, counts: keep(self, counts.clamp(max=1)))
    assert not probed(tiny_model("llama"))[0]


def test_rows_that_stay_when_they_should_leave_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    select = SharedRows.select
    replaced(monkeypatch, "select", lambda self, rows: select(self, torch.tensor([0, 1])))
    assert not probed(tiny_model("llama"))[0]


def test_a_small_error_of_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Any = SharedRows.attend
    replaced(monkeypatch, "attend", lambda self, *arguments: attend(self, *arguments) * 1.003)
    assert not probed(tiny_model("llama"))[0]


def test_a_small_error_of_layers_written_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = lean._joined

    def slightly_wrong(*given: Any) -> tuple[Tensor, Tensor]:
        total, normed = joined(*given)
        return total, normed * 1.003

    monkeypatch.setattr(lean, "_joined", slightly_wrong)
    exact, forward = probed(tiny_model("llama"))
    assert exact
    assert forward.lean is None


# ---------------------------------------------------------------- what it must forgive
def test_logits_of_any_size_are_compared_by_their_own() -> None:
    model = tiny_model("untied")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3e4)
    exact, forward = probed(model)
    assert exact
    assert forward.lean is not None


def test_a_model_of_five_tokens_is_probed_with_those_it_has() -> None:
    exact, forward = probed(LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "vocab_size": 5}, num_key_value_heads=4)))
    assert exact
    assert forward.lean is not None


# ---------------------------------------------------------------- what it leaves behind
@pytest.mark.parametrize("was_set", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_attention_that_somebody_had_set_stays_and_ours_goes_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, was_set: bool, exact: bool
) -> None:
    model = tiny_model("llama")
    if was_set:
        assert use_packed_attention(model)
    monkeypatch.setattr(open_rows, "_shared_equals_plain", lambda forward: exact)
    assert probed(model)[0] == exact
    assert has_packed_attention(model) == (was_set or exact)


def test_where_rows_share_no_prompts_no_layers_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_rows, "_shared_equals_plain", lambda forward: forward.lean is not None)
    exact, forward = probed(tiny_model("llama"))
    assert (exact, forward.lean) == (False, None)


@pytest.mark.parametrize("place", [0, 1])
def test_a_probe_that_ran_out_of_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    places = iter(range(2))

    def probe(forward: Forward) -> bool:
        if next(places) == place:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return EXACT(forward)

    monkeypatch.setattr(open_rows, "_shared_equals_plain", probe)
    with pytest.raises(torch.OutOfMemoryError):
        probed(tiny_model("llama"))


def test_rows_reserve_what_the_sampler_asks_for() -> None:
    _, forward = probed(tiny_model("llama"))
    rows: Any = open_rows.open_rows(forward, shared=True, room_tokens=9)
    assert rows._room_tokens == 9


# ---------------------------------------------------------------- outputs
def outputs(rows: range, *, hidden: bool = True) -> Outputs:
    """[B, 1, 2] logits and [B, 1, 3] hidden states that tell their row."""
    row_B = torch.tensor(list(rows), dtype=torch.float32)[:, None, None]
    return Outputs(row_B.expand(-1, 1, 2), row_B.expand(-1, 1, 3) if hidden else None)


def told(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return tensor[:, 0, 0].tolist()


def test_logits_and_hidden_states_are_selected_and_joined_alike() -> None:
    joined = Outputs.joined([outputs(range(2)), outputs(range(2, 5))])
    assert told(joined.logits_BQV) == told(joined.hidden_BQH) == [0, 1, 2, 3, 4]
    chosen = joined.select(torch.tensor([4, 1, 1]))
    assert told(chosen.logits_BQV) == told(chosen.hidden_BQH) == [4, 1, 1]
    without = Outputs.joined([outputs(range(2), hidden=False), outputs(range(1), hidden=False)])
    assert (told(without.select(torch.tensor([2])).logits_BQV), without.hidden_BQH) == ([0], None)
