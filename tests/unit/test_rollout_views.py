"""The group page's arithmetic and marked text."""

from typing import Any

from app.rollouts.views import group_view, segments, token_views


def part(name: str, value: float | None, weight: float, span: tuple[int, int] | None = None) -> dict[str, Any]:
    start, end = span or (None, None)
    return {"name": name, "value": value, "weight": weight, "explanation": "", "span_start": start, "span_end": end, "version": "v"}


def row(index: int, reward: float | None, advantage: float, parts: list[dict[str, Any]], text: str = "x") -> dict[str, Any]:
    return {
        "completion_index": index, "num_tokens": 3, "finish_reason": "stop", "reward": reward, "advantage": advantage,
        "completion_text": text, "parts": parts, "prompt_id": "p", "prompt_text": "1+1=", "gold": "2", "dropped": None,
    }  # fmt: skip


def test_the_sum_and_the_advantage_are_written_out() -> None:
    rows = [
        row(1, 0.094, -0.7071, [part("accuracy", 0.0, 1.0), part("format", 1.0, 0.1), part("length", -0.3, 0.02)]),
        row(0, 1.094, 0.7071, [part("accuracy", 1.0, 1.0), part("format", 1.0, 0.1), part("length", -0.3, 0.02)]),
    ]
    group = group_view(rows, normalize_std=True)
    assert group.formula == "reward = 1.0·accuracy + 0.1·format + 0.02·length"
    assert group.advantage_formula == "advantage = (reward − 0.594) / 0.707"
    first, second = group.completions
    assert first.sum_text == "1.000 + 0.100 − 0.006"
    assert first.advantage_text == "(1.094 − 0.594) / 0.707 = +0.71"
    assert second.advantage_bar.x + second.advantage_bar.width == 50
    assert group.best == 0


def test_equal_rewards_have_no_advantage_and_say_so() -> None:
    group = group_view([row(i, 1.0, 0.0, [part("accuracy", 1.0, 1.0)]) for i in range(4)], normalize_std=True)
    assert "equal" in group.advantage_formula
    assert {c.advantage_text for c in group.completions} == {"equal rewards, so 0"}


def test_an_abstention_is_left_out_of_the_sum() -> None:
    group = group_view([row(0, None, 0.0, [part("mine", None, 1.0)])], normalize_std=True)
    assert group.completions[0].sum_text == "every part abstained"
    assert group.completions[0].parts[0].sum_text == "abstained, left out of the sum"


def test_text_is_cut_at_the_reasoning_and_the_judged_answer() -> None:
    text = "<think>a</think>656 units"
    cut = segments(text, [part("format", 1.0, 0.1, (0, 25)), part("accuracy", 0.0, 1.0, (16, 19))])
    assert [(s.kind, s.text) for s in cut] == [("think", "<think>a</think>"), ("wrong", "656"), ("plain", " units")]
    assert "".join(s.text for s in cut) == text


def test_a_span_inside_the_reasoning_keeps_the_text_whole() -> None:
    text = "<think>ab</think>c"
    cut = segments(text, [part("accuracy", 1.0, 1.0, (7, 9))])
    assert "".join(s.text for s in cut) == text
    assert [s.kind for s in cut] == ["think", "right", "think", "plain"]


def test_an_unlikely_token_is_darker() -> None:
    views = token_views(
        {"token_ids": [1, 2], "token_texts": ["a", "b"], "logprobs": [-0.01, -4.0], "full_logprobs": [-0.01, -4.5], "ref_logprobs": None}
    )
    assert [view.css for view in views] == ["lp0", "lp5"]
    assert "untruncated" in views[1].title
