"""Decoding with drafts as a whole: the law of completions, rows that end, numbers, metrics."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import MTPDrafts, NgramDrafts, NoDrafts
from grpo_engine.rollout.ngram import NgramDrafter
from grpo_engine.rollout.speculation import Pending, Speculator, make_speculator
from grpo_engine.streams import uniforms
from grpo_engine.types import SampleRequest
from tests.unit.speculation_fakes import (
    NO_ENDS,
    MarkovDrafter,
    MarkovRows,
    chain_probabilities,
    decode,
    deviation,
    requests,
    table,
)

POLICY, DRAFTER = table(4, 1), table(4, 2)
PLAIN = (0,)


def settings(**values: Any) -> SamplingConfig:
    return SamplingConfig.model_validate({"max_new_tokens": 5, **values})


def speculator(*lengths: int, samples: bool = True, ends: torch.Tensor = NO_ENDS) -> Speculator:
    seconds = count()
    return Speculator(MarkovDrafter(DRAFTER, samples=samples), lengths, ends, lambda: next(seconds) * 1.0)


def ngram(*lengths: int) -> Speculator:
    return Speculator(NgramDrafter(1, 3, 5, torch.device("cpu")), lengths, NO_ENDS)


def admit(drafting: Speculator, rows: int) -> None:
    drafting.admit(requests(rows), torch.zeros(rows, dtype=torch.long), torch.zeros(rows, 1), 9)


# ---------------------------------------------------------------- the law of what is sampled
@pytest.mark.parametrize(
    ("filters", "lengths"),
    [
        ({}, (1,)),
        ({}, (3,)),
        ({"temperature": 0.7, "top_k": 3}, (2,)),
        ({"top_p": 0.85}, (2, 0, 3, 1)),
        ({"min_p": 0.2, "temperature": 1.3}, (3,)),
    ],
)
def test_completions_are_distributed_as_without_drafts(filters: dict[str, Any], lengths: tuple[int, ...]) -> None:
    sampling = settings(**filters)
    tokens, _ = decode(speculator(2), POLICY, requests(6_000), sampling, lengths)
    seen = Counter(tuple(row) for row in tokens)
    exact = chain_probabilities(POLICY, sampling, 4)
    assert deviation([seen[chain] for chain in exact], list(exact.values())) < 5


@pytest.mark.parametrize("make", [ngram, lambda length: speculator(length, samples=False)])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0}])
def test_drafts_made_with_certainty_leave_every_token_as_it_was(make: Any, filters: dict[str, Any]) -> None:
    sampling = settings(**filters, max_new_tokens=30)
    plain, plain_steps = decode(make(3), POLICY, requests(40), sampling, PLAIN)
    drafted, steps = decode(make(3), POLICY, requests(40), sampling, (3, 1, 4))
    assert drafted == plain
    assert len(steps) < len(plain_steps)


def test_greedy_completions_are_the_same_with_a_drafter_that_samples() -> None:
    sampling = settings(temperature=0, max_new_tokens=12)
    plain, _ = decode(speculator(2), POLICY, requests(3), sampling, PLAIN)
    assert decode(speculator(2), POLICY, requests(3), sampling, (3,))[0] == plain


def test_a_row_is_sampled_the_same_alone_and_among_others() -> None:
    sampling = settings(max_new_tokens=20)
    together, _ = decode(speculator(3), POLICY, requests(30), sampling)
    for row in (0, 7, 29):
        assert decode(speculator(3), POLICY, requests(30)[row : row + 1], sampling)[0] == [together[row]]


# ---------------------------------------------------------------- rows that end
def test_an_end_token_inside_a_draft_ends_the_row_there() -> None:
    ends = torch.tensor([2, 3])
    drafting = Speculator(MarkovDrafter(POLICY), [3], ends)
    tokens, _ = decode(drafting, POLICY, requests(300), settings(max_new_tokens=12))
    assert all(token < 2 for row in tokens for token in row[:-1])
    assert all(row[-1] >= 2 or len(row) == 11 for row in tokens)
    assert len({len(row) for row in tokens}) > 5


def test_no_row_gains_more_than_its_budget() -> None:
    tokens, _ = decode(Speculator(MarkovDrafter(POLICY), [5], NO_ENDS), POLICY, requests(20), settings())
    assert [len(row) for row in tokens] == [4] * 20


def test_the_drafter_follows_every_token_drafted_or_not() -> None:
    drafter = MarkovDrafter(DRAFTER)
    tokens, _ = decode(
        Speculator(drafter, [2], NO_ENDS), POLICY, requests(10), settings(max_new_tokens=15), (0, 2, 0, 0, 3)
    )
    assert drafter.rows == [[0, *row] for row in tokens]


def test_rows_left_by_a_call_that_failed_are_forgotten() -> None:
    drafting = speculator(2)
    admit(drafting, 3)
    again, _ = decode(drafting, POLICY, requests(5), settings())
    assert again == decode(speculator(2), POLICY, requests(5), settings())[0]


def test_selected_rows_keep_their_own_numbers() -> None:
    drafting = speculator(2)
    admit(drafting, 6)
    drafting.select(torch.tensor([4, 1]))
    position_B = torch.tensor([3, 5])
    kept = drafting.numbers.at("accept", position_B, 2)
    fresh = speculator(2)
    admit(fresh, 6)
    every = fresh.numbers.at("accept", torch.tensor([0, 5, 0, 0, 3, 0]), 2)
    assert torch.equal(kept, every[[4, 1]])
    assert not torch.equal(kept, drafting.numbers.at("draft", position_B, 2))


@pytest.mark.parametrize("name", ["draft", "accept"])
def test_every_place_of_a_completion_has_its_own_number(name: str) -> None:
    drafting = speculator(2)
    admit(drafting, 2)
    expected = np.stack([uniforms(9, name, *request.stream) for request in requests(2)])
    found_BT = drafting.numbers.at(name, torch.zeros(2, dtype=torch.long), 9)
    assert found_BT.tolist() == expected.tolist()
    assert len(set(found_BT.flatten().tolist())) == 18
    assert drafting.numbers.at(name, torch.tensor([8, 7]), 1).tolist() == [[expected[0, 8]], [expected[1, 7]]]


def test_rows_that_come_later_have_their_own_numbers_too() -> None:
    later, together = speculator(2), speculator(2)
    admit(together, 3)
    for asked in (requests(3)[:2], requests(3)[2:]):
        later.admit(asked, torch.zeros(len(asked), dtype=torch.long), torch.zeros(len(asked), 1), 9)
    position_B = torch.tensor([0, 3, 8])
    assert torch.equal(later.numbers.at("draft", position_B, 1), together.numbers.at("draft", position_B, 1))


# ---------------------------------------------------------------- what is told
class Learned:
    """Stands in for DraftLength: remembers what it is asked and told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def choose(self, num_rows: int, num_tokens: int) -> int:
        self.told.append((num_rows, num_tokens))
        return 3

    def plain_seconds(self) -> float | None:
        return None

    def observe(self, *told: Any) -> None:
        self.told.append(told)


def test_a_steps_time_is_that_of_all_rows_and_its_acceptance_that_of_rows_that_go_on() -> None:
    """As below: of three rows one has ended, one has a token left; the clock moves on a second at a time."""
    chain, seconds = torch.eye(4).roll(1, dims=1) * 50, count(10)
    drafting = Speculator(MarkovDrafter(chain), [3], torch.tensor([2]), lambda: float(next(seconds)))
    learned: Any = Learned()
    drafting._lengths = learned
    admit(drafting, 3)
    pending = Pending(torch.zeros(3).long(), torch.ones(3).long(), torch.tensor([0, 1, 9]), None)
    length = drafting.choose_length(3, 40)
    drafting.step(MarkovRows(chain, 3), length, pending, settings(temperature=0))
    assert learned.told == [(3, 40), (3, [2, 2, 1, 0], 1.0)]


def test_a_drafter_is_given_whole_prompts_and_what_follows_them() -> None:
    drafter, told = MarkovDrafter(DRAFTER), list[Any]()
    drafter.admit = lambda *admitted: told.append(admitted)  # type: ignore[method-assign]
    first_B, hidden_BH = torch.tensor([3, 1]), torch.ones(2, 1)
    asked = [SampleRequest([5, 6, 7], (0, 0), "0"), SampleRequest([8], (0, 1), "1")]
    Speculator(drafter, [2], NO_ENDS).admit(asked, first_B, hidden_BH, 9)
    assert told == [([[5, 6, 7], [8]], first_B, hidden_BH)]


def test_rows_that_ended_and_drafts_behind_an_end_do_not_count() -> None:
    """0 is followed by 1 and 1 by 2, which ends; one row has ended, one has a token left, one has nine."""
    chain = torch.eye(4).roll(1, dims=1) * 50
    drafting, rows = Speculator(MarkovDrafter(chain), [3], torch.tensor([2])), MarkovRows(chain, 3)
    admit(drafting, 3)
    pending = Pending(torch.zeros(3).long(), torch.ones(3).long(), torch.tensor([0, 1, 9]), None)
    assert drafting.step(rows, 3, pending, settings(temperature=0)).counts_B.tolist() == [0, 1, 2]
    assert rows.held == [[], [0], [0, 1]]
    told = drafting.take_metrics()
    assert (told["rollout/drafted_tokens"], told["rollout/accepted_share"]) == (4, 0.75)
    assert told["rollout/tokens_per_forward"] == 1.5


def test_metrics_count_drafts_and_begin_anew() -> None:
    drafting = Speculator(MarkovDrafter(POLICY), [2], NO_ENDS)
    decode(drafting, POLICY, requests(2), settings(temperature=0, max_new_tokens=8), (2, 0, 2))
    # Steps of 3, 1 and 3 tokens; every draft is right.
    assert drafting.take_metrics() == {
        "rollout/drafted_tokens": 8,
        "rollout/accepted_share": 1,
        "rollout/accepted_share_1": 1,
        "rollout/accepted_share_2": 1,
        "rollout/draft_length_mean": pytest.approx(4 / 3),
        "rollout/draft_length_share_0": pytest.approx(1 / 3),
        "rollout/draft_length_share_2": pytest.approx(2 / 3),
        "rollout/tokens_per_forward": pytest.approx(7 / 3),
    }
    assert drafting.take_metrics() == {}


def test_acceptance_is_told_by_depth() -> None:
    drafting = speculator(2)
    _, steps = decode(drafting, POLICY, requests(500), settings(max_new_tokens=60), (3,))
    told = drafting.take_metrics()
    shares = [told[f"rollout/accepted_share_{depth}"] for depth in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True)
    assert told["rollout/accepted_share"] == pytest.approx(sum(shares) / 3, abs=0.01)
    assert told["rollout/tokens_per_forward"] == pytest.approx(1 + sum(shares), abs=0.03)
    assert len(steps) > 15


def test_the_gain_is_told_where_plain_decoding_was_timed() -> None:
    """By this clock every step takes a second, so that the gain is the tokens a step."""
    drafting = speculator(0, 2)
    decode(drafting, DRAFTER, requests(4), settings(max_new_tokens=400))
    told = drafting.take_metrics()
    assert told["rollout/draft_gain"] == pytest.approx(told["rollout/tokens_per_forward"], rel=0.02)
    assert told["rollout/draft_gain"] > 2.5
    assert told["rollout/draft_length_share_2"] > 0.8


def test_steps_in_which_no_row_has_a_draft_are_plain() -> None:
    drafting = ngram(4)
    chain = torch.full((9, 9), -50.0)
    for token in range(9):
        chain[token, (token + 1) % 9] = 50.0
    decode(drafting, chain, requests(2, prompt=[8]), settings(max_new_tokens=8))
    assert drafting.take_metrics()["rollout/draft_length_share_0"] == 1


# ---------------------------------------------------------------- the config
def test_the_config_names_the_drafter_and_its_lengths() -> None:
    assert make_speculator(NoDrafts(), NO_ENDS) is None
    drafting = make_speculator(NgramDrafts(fixed_tokens=7), NO_ENDS)
    assert drafting is not None
    assert drafting.choose_length(128, 9) == 7
    decode(drafting, torch.eye(4).roll(1, dims=1) * 50, requests(1), settings(max_new_tokens=16))
    assert drafting.take_metrics()["rollout/drafted_tokens"] > 0
    heads = MarkovDrafter(DRAFTER)
    drafting = make_speculator(MTPDrafts(min_tokens=3), NO_ENDS, heads, deterministic=True)
    assert drafting is not None
    assert {drafting.choose_length(rows, 9) for rows in (1, 64, 256)} == {3}
    with pytest.raises(ValueError, match="heads"):
        make_speculator(MTPDrafts(), NO_ENDS)
