"""The small parts of the decoding loop: waiting requests, stop texts, the record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.expected_lengths import ExpectedLengths
from grpo_engine.rollout.record import Record
from grpo_engine.rollout.stop_texts import StopTexts
from grpo_engine.rollout.waiting import Entry, Waiting
from grpo_engine.types import SampleRequest
from tests.unit.tiny_models import TOKENIZER


def requests(*sizes: int, width: int = 1) -> list[SampleRequest]:
    """Groups of the given sizes; prompt n is [n, n, …]."""
    return [SampleRequest([n] * width, (n, copy), str(n)) for n, size in enumerate(sizes) for copy in range(size)]


# ---------------------------------------------------------------- waiting
def test_groups_start_in_order_while_they_fit_and_the_last_is_divided_if_it_must() -> None:
    waiting = Waiting(requests(2, 2, 3), None)
    assert waiting.take(5, least=4) == [Entry((0,), [0, 1]), Entry((1,), [2, 3])]
    assert waiting.take(2, least=3) == []
    assert waiting.take(2, least=2) == [Entry((2,), [4, 5])]
    assert waiting.take(9, least=4) == [Entry((2,), [6])]
    assert waiting.num_rows == waiting.num_fresh == 0


def test_equal_prompts_of_different_groups_share_an_entry() -> None:
    asked = [SampleRequest([7], (0,), "a"), SampleRequest([8], (1,), "b"), SampleRequest([7], (2,), "c")]
    assert Waiting(asked, None).take(9, 1) == [Entry((7,), [0, 2]), Entry((8,), [1])]


def test_what_was_set_aside_comes_last() -> None:
    waiting = Waiting(requests(1, 1), None)
    assert len(waiting.take(1, 1)) == 1
    waiting.set_aside([0, 5, 6], 0, 2)
    assert (waiting.num_rows, waiting.num_fresh) == (2, 1)
    assert waiting.take(1, 1) == [Entry((1,), [1])]
    assert waiting.take(1, 1) == [Entry((0, 5, 6), [0], 2)]
    assert (waiting.num_rows, waiting.num_fresh) == (0, 0)


def test_long_expected_completions_start_first() -> None:
    lengths = ExpectedLengths()
    lengths.learn([[0], [1], [2]], [5, 50, 20])
    waiting = Waiting(requests(1, 1, 1), lengths)
    assert [waiting.take(1, 1)[0].token_ids for _ in range(3)] == [(1,), (2,), (0,)]


# ---------------------------------------------------------------- stop texts
def cut(stops: StopTexts, *tokens: int, count: int | None = None) -> tuple[int, bool]:
    counts, ended = stops.cut(np.array([0]), np.array([len(tokens) if count is None else count]), np.array([tokens]))
    return int(counts[0]), bool(ended[0])


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def test_a_stop_text_over_several_steps_is_found_at_the_token_that_completes_it() -> None:
    stops = StopTexts(TOKENIZER, ["ab=", "zz"])
    assert cut(stops, *ids("1a")) == (2, False)
    assert cut(stops, *ids("b=b=")) == (2, True)
    assert cut(stops, *ids("=")) == (1, False), "the next completion of that number starts anew"


def test_tokens_beyond_the_count_are_not_looked_at() -> None:
    stops = StopTexts(TOKENIZER, ["ab"])
    assert cut(stops, *ids("ab"), count=1) == (1, False)
    assert cut(stops, *ids("ab"), count=0) == (0, False)
    assert cut(stops, *ids("b")) == (1, True)


def test_only_the_end_of_a_long_completion_is_decoded() -> None:
    stops = StopTexts(TOKENIZER, ["x" * 30])
    for _ in range(500):
        assert cut(stops, *ids("xxxxxxxxxxx1")) == (12, False)
    assert len(stops._tails[0]) < 100
    assert cut(stops, *ids("x" * 40)) == (30, True)


def test_a_character_of_several_tokens_completes_a_stop_text() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    tokens = tokenizer("12 €").input_ids
    assert len(tokens) == 6
    stops = StopTexts(tokenizer, ["€"])
    assert [cut(stops, token) for token in tokens] == [(1, False)] * 5 + [(1, True)]


# ---------------------------------------------------------------- record
def write(record: Record, requests: list[int], places: list[int], counts: list[int], tokens: list[list[int]]) -> None:
    logprobs = -torch.tensor(tokens, dtype=torch.float32)
    kept = torch.zeros(*logprobs.shape, 9, dtype=torch.bool).scatter_(2, torch.tensor(tokens)[..., None], True)
    arrays = (np.array(values) for values in (requests, places, counts, tokens))
    record.write(*arrays, logprobs, 2 * logprobs, kept | (torch.arange(9) == 8))


def test_a_record_puts_every_token_to_its_request_and_place() -> None:
    record = Record(3, truncated=True)
    write(record, [2, 0], [0, 0], [2, 1], [[1, 2], [3, 4]])
    write(record, [0, 2], [1, 2], [0, 1], [[5], [6]])
    assert record.tokens_of(2) == [1, 2, 6]
    first, second, third = record.finish()
    assert (first.token_ids, second.token_ids, third.token_ids) == ([3], [], [1, 2, 6])
    assert (third.logprobs, third.full_logprobs) == ([-1, -2, -6], [-2, -4, -12])
    assert (first.kept_ids, second.kept_ids, third.kept_ids) == ([[3, 8]], [], [[1, 8], [2, 8], [6, 8]])


def test_only_numbers_that_count_must_be_finite() -> None:
    for counts, raises in ([1, 0], False), ([1, 1], True):
        record = Record(2, truncated=False)
        logprobs = torch.tensor([[-1.0], [float("nan")]])
        record.write(
            np.arange(2), np.zeros(2, dtype=np.int64), np.array(counts), np.ones((2, 1)), logprobs, logprobs, None
        )
        if raises:
            with pytest.raises(NonFinite):
                record.finish()
        else:
            assert record.finish()[1].kept_ids is None
