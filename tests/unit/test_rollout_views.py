"""The group page's arithmetic and marked text."""

from dataclasses import replace

import pytest

from app.rollouts import arithmetic
from app.rollouts.arithmetic import AdvantageForm, form_of, group_numbers, mean_rank
from app.rollouts.batches import BatchView
from app.rollouts.service import CompletionDetail, GroupDetail, PartDetail
from app.rollouts.tokens import TokenDetail
from app.rollouts.views import group_view, segments, token_views


def part(name: str, value: float | None, weight: float, span: tuple[int, int] | None = None) -> PartDetail:
    return PartDetail(name, value, weight, value, None if value is None else weight * value, "", span, "v")


def completion(index: int, reward: float | None, advantage: float, parts: list[PartDetail]) -> CompletionDetail:
    return CompletionDetail(index, "x", "stop", 3, 0, reward, None, reward, advantage, advantage, None, None, parts)


def group(rows: list[CompletionDetail], kind: str = "grpo", **form: object) -> GroupDetail:
    batch, about = BatchView(1, 1, "1-rl", 1, 1, len(rows), "runs/x"), form_of({"advantage": {"form": kind, **form}})
    used = [row.used_reward for row in rows]
    numbers = group_numbers(used, about)
    rows = [
        replace(
            row,
            baseline=arithmetic.baseline(row.used_reward, numbers, about),
            rank=mean_rank(row.used_reward, used, about),
        )
        for row in rows
    ]
    return GroupDetail(batch, 0, "1-0", "p", 0, "1+1=", "2", {}, None, about, numbers, None, rows)


def test_the_sum_and_the_advantage_are_written_out() -> None:
    parts = [part("format", 1.0, 0.1), part("length", -0.3, 0.02)]
    view = group_view(
        group(
            [
                completion(0, 1.094, 0.7071, [part("accuracy", 1.0, 1.0), *parts]),
                completion(1, 0.094, -0.7071, [part("accuracy", 0.0, 1.0), *parts]),
            ]
        )
    )
    assert view.formula == "reward = 1.0·accuracy + 0.1·format + 0.02·length"
    assert view.advantage_formula == "advantage = (reward − 0.594) / 0.707"
    first, second = view.completions
    assert first.sum_text == "1.000 + 0.100 − 0.006"
    assert first.advantage_text == "(1.094 − 0.594) / 0.707 = +0.71"
    assert second.advantage_bar.x + second.advantage_bar.width == 50
    assert view.best == 0


def test_a_gated_part_shows_its_value_and_what_it_counts_as() -> None:
    gated = replace(part("accuracy", 1.0, 2.0), counted=0.0, product=0.0)
    [row] = group_view(group([completion(0, 0.0, 0.0, [gated])])).completions
    assert row.parts[0].sum_text == "2.0 × 0.000 = 0.000 (its value 1.000 was gated or clipped)"
    assert row.sum_text == "0.000"


@pytest.mark.parametrize(
    ("kind", "formula", "text"),
    [
        ("seed_paper", "advantage = (reward − 0.250) / 0.433, the population", "(1.000 − 0.250) / 0.433 = +1.00"),
        ("dr_grpo", "advantage = reward − 0.250", "1.000 − 0.250 = +1.00"),
        ("rloo", "advantage = reward − mean of the other rewards", "1.000 − 0.000 = +1.00"),
        ("rank", "advantage = (2 · rank − 4 − 1) / 3, rank 1 the lowest", "rank 4: (2 · 4 − 4 − 1) / 3 = +1.00"),
        ("gae", "advantage of a token = return − value; GAE; of a completion", "mean of 3 tokens = +1.00"),
    ],
)
def test_every_form_of_advantage_is_written_out(kind: str, formula: str, text: str) -> None:
    rows = [completion(i, float(i == 0), float(i == 0), [part("accuracy", 1.0, 1.0)]) for i in range(4)]
    view = group_view(group(rows, kind))
    assert view.advantage_formula.startswith(formula)
    assert view.completions[0].advantage_text == text


def test_equal_rewards_share_the_mean_of_their_ranks() -> None:
    form = AdvantageForm("rank")
    assert [mean_rank(r, [0.0, 1.0, 1.0, None], form) for r in (0.0, 1.0, None)] == [1.0, 2.5, None]


def test_a_shaped_reward_is_shown_beside_the_reward_and_used() -> None:
    rows = [completion(i, float(i), 0.0, [part("accuracy", 1.0, 1.0)]) for i in range(2)]
    rows = [replace(row, shaped_reward=(row.reward or 0.0) - 0.25) for row in rows]
    kl = {"weight": 0.05, "estimator": "k2", "place": "reward"}
    view = group_view(group(rows, "dr_grpo", kl=kl, smooth_rewards=True))
    assert view.shaping_formula.startswith("shaped reward = reward − 0.05 · sum of k2 + shift")
    assert view.completions[1].shaping_text == "1.000 − 0.250 = 0.750"
    assert view.completions[1].advantage_text == "0.750 − 0.250 = 0.00"


def test_the_first_files_tell_only_whether_they_divide() -> None:
    assert form_of({"advantage": {"form": "grpo", "normalize_std": True}}).kind == "grpo"
    assert form_of({"advantage": {"form": "grpo", "normalize_std": False}}).kind == "dr_grpo"
    assert form_of({}).kind == "grpo"


def test_a_group_that_was_not_trained_on_says_why() -> None:
    one = group([completion(0, 1.0, 0.0, [part("accuracy", 1.0, 1.0)])])
    assert "its rewards are equal" in group_view(replace(one, dropped="zero_variance")).dropped_text
    assert "judged" in group_view(replace(one, dropped="all_abstained")).dropped_text
    assert group_view(replace(one, dropped="some_reason")).dropped_text == "some reason"


def test_a_token_of_ppo_tells_its_advantage_value_and_return() -> None:
    [up, down] = token_views(
        [
            TokenDetail(0, 1, "a", -0.1, -0.1, None, None, 0.5, 0.75, 0.25),
            TokenDetail(1, 2, "b", -0.1, -0.1, None, None, 0.5, 0.25, -0.25),
        ]
    )
    assert up.title.endswith("; advantage +0.250, value 0.500, return 0.750")
    assert (up.tone, down.tone) == ("up", "down")


def test_equal_rewards_have_no_advantage_and_say_so() -> None:
    view = group_view(group([completion(i, 1.0, 0.0, [part("accuracy", 1.0, 1.0)]) for i in range(4)]))
    assert "equal" in view.advantage_formula
    assert {c.advantage_text for c in view.completions} == {"equal rewards, so 0"}


def test_an_abstention_is_left_out_of_the_sum() -> None:
    view = group_view(group([completion(0, None, 0.0, [part("mine", None, 1.0)])]))
    assert view.completions[0].sum_text == "every part abstained"
    assert view.completions[0].parts[0].sum_text == "abstained, left out of the sum"


def test_text_is_cut_at_the_reasoning_and_the_judged_answer() -> None:
    text = "<think>a</think>656 units"
    cut = segments(text, [part("format", 1.0, 0.1, (0, 25)), part("accuracy", 0.0, 1.0, (16, 19))])
    assert [(s.kind, s.text) for s in cut] == [("think", "<think>a</think>"), ("wrong", "656"), ("plain", " units")]


def test_a_span_inside_the_reasoning_keeps_the_text_whole() -> None:
    text = "<think>ab</think>c"
    cut = segments(text, [part("accuracy", 1.0, 1.0, (7, 9))])
    assert "".join(s.text for s in cut) == text
    assert [s.kind for s in cut] == ["think", "right", "think", "plain"]


def test_an_unlikely_token_is_darker() -> None:
    views = token_views(
        [TokenDetail(0, 1, "a", -0.01, -0.01, None, None), TokenDetail(1, 2, "b", -4.0, -4.5, None, None)]
    )
    assert [view.css for view in views] == ["lp0", "lp5"]
    assert "untruncated" in views[1].title
