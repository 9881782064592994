"""What servers read and answer, to the last detail: weights files, truncated and cut completions. Needs no vLLM."""

from __future__ import annotations

import math
import stat
import threading
from pathlib import Path

import pytest
import torch

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.vllm.outputs import Completions, read_untruncated
from grpo_engine.rollout.vllm.turns import Turns
from grpo_engine.rollout.vllm.weights_file import WeightsFile
from tests.unit.tiny_models import TOKENIZER

TEXT = TOKENIZER("7+5=12;").input_ids


# ---------------------------------------------------------------- weights
@pytest.mark.parametrize("name", ["a", "ab", "abc", "model.layers.10.up_proj.weight"])
def test_tensors_begin_at_a_multiple_of_eight_bytes_as_whoever_maps_the_file_needs(tmp_path: Path, name: str) -> None:
    file = WeightsFile([(name, torch.ones(3))], dtype="float32", folder=tmp_path)
    content = Path(file.path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (length % 8, len(content)) == (0, 8 + length + 12)
    file.close()


def test_a_shared_folder_shows_the_weights_to_nobody_else_and_may_be_emptied_by_others(tmp_path: Path) -> None:
    file = WeightsFile([("a", torch.ones(3))], dtype="float32", folder=tmp_path)
    other = WeightsFile([("a", torch.ones(3))], dtype="float32", folder=tmp_path)
    assert file.path != other.path
    assert stat.S_IMODE(Path(file.path).stat().st_mode) == 0o600
    Path(file.path).unlink()
    file.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- completions
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_log_probability_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(NonFinite, match="not finite"):
        Completions(TOKENIZER, {2}).make(read_untruncated([7, 8], [-0.5, value], "length"), (), 0)


def test_without_truncation_both_log_probabilities_are_one() -> None:
    sampled = read_untruncated([7, 8], [-0.5, -0.25], "length")
    assert sampled.logprobs == sampled.full_logprobs == [-0.5, -0.25]


def test_a_stop_text_that_the_first_token_holds_leaves_one_token() -> None:
    made = Completions(TOKENIZER, {2}).make(read_untruncated(TEXT, [-1.0] * len(TEXT), "length"), ("7",), 0)
    assert (made.token_ids, made.text, made.finish_reason) == (TEXT[:1], "7", "stop")


# ---------------------------------------------------------------- turns
def test_during_a_turn_the_next_in_line_is_free_to_stand_there() -> None:
    turns, order = Turns(), list[str]()

    def other() -> None:
        with turns.turn():
            order.append("other")

    with turns.turn():
        assert not turns._next.locked()
        thread = threading.Thread(target=other)
        thread.start()
        order.append("same")
    thread.join()
    assert order == ["same", "other"]
