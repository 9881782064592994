"""From what vLLM returned to completions, and whose turn it is to use an engine. Needs no vLLM."""

from __future__ import annotations

import math
import threading

import pytest

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.vllm.outputs import MASS_OFFSET, Completions, Sampled, read_truncated
from grpo_engine.rollout.vllm.turns import Turns
from grpo_engine.types import Completion
from tests.unit.tiny_models import TOKENIZER
from tests.waiting import wait_until

EOS = 2
TEXT = TOKENIZER("7+5=12;").input_ids


def make(
    tokens: list[int], finish: str | None, stop: tuple[str, ...] = (), ends: tuple[int, ...] = (EOS,)
) -> Completion:
    """Token n has the log-probabilities -n - 1 and -n - 2, and n + 1 kept ids."""
    places = range(len(tokens))
    kept = [list(range(n + 1)) for n in places]
    sampled = Sampled(tokens, [-n - 1.0 for n in places], [-n - 2.0 for n in places], kept, finish)
    return Completions(TOKENIZER, ends).make(sampled, stop, 5)


# ---------------------------------------------------------------- entries beside a token
def test_kept_ids_are_those_with_a_log_probability_and_the_mass_makes_it_full() -> None:
    entries = [([9, 0, 4, 9, 1], [-0.3, MASS_OFFSET - math.log(0.8), -1.4, -0.3, -9999.0]), ([4], [0.0])]
    found = read_truncated([9, 4], entries, "length")
    assert found.kept_ids == [[4, 9], [4]]
    assert found.logprobs == [-0.3, 0.0]
    assert found.full_logprobs == pytest.approx([-0.3 + math.log(0.8), 0.0])
    assert found.finish == "length"


@pytest.mark.parametrize("own", [math.nan, -math.inf, -9999.0])
def test_a_token_without_a_log_probability_of_its_own_is_refused(own: float) -> None:
    with pytest.raises(NonFinite, match="token 9"):
        read_truncated([9], [([9, 4], [own, -0.5])], "length")


def test_a_log_probability_that_is_none_is_refused() -> None:
    with pytest.raises(NonFinite, match="not finite"):
        Completions(TOKENIZER, (EOS,)).make(Sampled([7], [math.nan], [math.nan], None, "length"), (), 0)


# ---------------------------------------------------------------- ends
def test_a_completion_ends_with_the_first_end_token_wherever_vllm_ended() -> None:
    found = make([*TEXT[:3], EOS, *TEXT[:2], EOS], "length")
    assert (found.token_ids, found.text, found.finish_reason) == ([*TEXT[:3], EOS], "7+5", "stop")
    assert found.logprobs == [-1.0, -2.0, -3.0, -4.0]
    assert found.full_logprobs == [-2.0, -3.0, -4.0, -5.0]
    assert found.kept_ids == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert (found.token_texts[:3], len(found.token_texts), found.policy_version) == (["7", "+", "5"], 4, 5)


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "length"), ("stop", "stop"), ("abort", "aborted"), (None, "aborted")]
)
def test_without_an_end_vllms_word_decides(finish: str | None, reason: str) -> None:
    found = make(TEXT, finish)
    assert (found.text, found.finish_reason) == ("7+5=12;", reason)


@pytest.mark.parametrize("stop", [("=",), ("12", "="), ("5=",)])
def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(stop: tuple[str, ...]) -> None:
    found = make(TEXT, "length", stop)
    assert (found.token_ids, found.text, found.finish_reason) == (TEXT[:4], "7+5=", "stop")


def test_a_stop_text_behind_an_end_token_does_not_count() -> None:
    found = make([*TEXT[:2], EOS, *TEXT], "length", ("=",))
    assert (found.text, len(found.token_ids)) == ("7+", 3)


def test_nothing_sampled_is_an_aborted_completion() -> None:
    found = make([], "abort")
    assert (found.token_ids, found.text, found.finish_reason) == ([], "", "aborted")


# ---------------------------------------------------------------- turns
def test_who_waits_gets_the_turn_before_a_thread_that_takes_it_again_and_again() -> None:
    turns, order = Turns(), list[str]()

    def other() -> None:
        with turns.turn():
            order.append("other")

    thread = threading.Thread(target=other)
    with turns.turn():
        thread.start()
        wait_until(turns._next.locked, 10, "the other waits")
    for _ in range(3):
        with turns.turn():
            order.append("same")
    thread.join()
    assert order == ["other", "same", "same", "same"]


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.turn():
        raise KeyError
    with turns.turn():
        assert turns._engine.locked()
