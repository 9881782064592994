import json

import pytest

from grpo_engine.rollout import expected_lengths
from grpo_engine.rollout.expected_lengths import ExpectedLengths

SHORT, LONG, WIDE = [1, 2, 3], [4, 5, 6], list(range(40))


def learned(*batches):
    lengths = ExpectedLengths()
    for batch in batches:
        lengths.learn([prompt for prompt, _ in batch], [count for _, count in batch])
    return lengths


def test_nothing_known_leaves_the_order():
    assert ExpectedLengths().order([LONG, SHORT, WIDE]) == [0, 1, 2]
    assert ExpectedLengths().expected_tokens(LONG) == 0
    assert ExpectedLengths().straggler_tokens is None


def test_prompts_that_were_long_before_start_first():
    lengths = learned([(SHORT, 10), (SHORT, 14), (LONG, 90), (LONG, 110)])
    assert lengths.expected_tokens(SHORT) == pytest.approx(12)
    assert lengths.expected_tokens(LONG) == pytest.approx(100)
    assert lengths.order([SHORT, LONG, SHORT, LONG]) == [1, 3, 0, 2]


def test_an_unknown_prompt_is_judged_by_those_of_its_size():
    lengths = learned(*[[(WIDE, 100), (SHORT, 20)]] * 20)
    assert lengths.expected_tokens(list(range(50))) == pytest.approx(100, rel=0.01)
    assert lengths.expected_tokens([9, 9]) == pytest.approx(20, rel=0.01)


def test_expectations_follow_a_policy_that_grows():
    lengths = learned([(SHORT, 10), (LONG, 30)], *[[(WIDE, 400)]] * 20)
    assert lengths.expected_tokens(LONG) == pytest.approx(3 * lengths.expected_tokens(SHORT))
    assert lengths.expected_tokens(LONG) > 400


def test_one_batch_moves_expectations_by_less_than_a_third():
    assert learned([(SHORT, 10)], [(SHORT, 110)], []).expected_tokens(SHORT) == pytest.approx(40)
    lengths = learned([(SHORT, 50), (WIDE, 150)])
    assert lengths.expected_tokens(list(range(50))) == pytest.approx(100 * 1.15)


def test_one_in_twenty_is_a_straggler():
    lengths = learned([(SHORT, count) for count in range(1, 101)])
    assert lengths.straggler_tokens == 95
    assert learned([(SHORT, 7)] * 63).straggler_tokens is None


def test_only_the_newest_lengths_say_what_is_usual():
    usual = [(SHORT, 500)] * expected_lengths.MAX_LENGTHS
    assert learned([(SHORT, 9)] * 100, usual).straggler_tokens == 500


def test_prompts_sampled_longest_ago_are_forgotten():
    others = [([7, index], 50) for index in range(expected_lengths.MAX_PROMPTS)]
    lengths = learned([(LONG, 150), (SHORT, 50)], others)
    assert len(lengths.state()["prompts"]) == expected_lengths.MAX_PROMPTS
    assert lengths.expected_tokens([7, 5]) == pytest.approx(lengths.expected_tokens([7, 6]))
    assert lengths.expected_tokens(LONG) == lengths.expected_tokens([9, 9, 9])  # no longer its own ratio


def test_a_prompt_that_is_sampled_again_is_remembered_longer():
    others = [([7, index], 50) for index in range(expected_lengths.MAX_PROMPTS - 2)]
    lengths = learned([(LONG, 150), (SHORT, 50)], others, [(LONG, 150)], [([8, 8], 50)])
    unknown = lengths.expected_tokens([9, 9, 9])
    assert lengths.expected_tokens(SHORT) == unknown != lengths.expected_tokens(LONG)


def test_a_resumed_run_expects_the_same():
    lengths = learned([(SHORT, 10), (LONG, 70), (WIDE, 33)] * 30)
    again = ExpectedLengths()
    again.restore(json.loads(json.dumps(lengths.state())))
    for prompt in (SHORT, LONG, WIDE, [5]):
        assert again.expected_tokens(prompt) == lengths.expected_tokens(prompt)
    assert again.straggler_tokens == lengths.straggler_tokens
    again.restore({})
    assert again.state() == lengths.state()
    again.learn([SHORT] * expected_lengths.MAX_LENGTHS, [9] * expected_lengths.MAX_LENGTHS)
    assert again.state()["lengths"] == [9] * expected_lengths.MAX_LENGTHS
