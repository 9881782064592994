"""The group page's arithmetic and marked text."""

from app.rollouts.batches import BatchView
from app.rollouts.service import CompletionDetail, GroupDetail, PartDetail, TokenDetail, mean_and_std
from app.rollouts.views import group_view, segments, token_views


def part(name: str, value: float | None, weight: float, span: tuple[int, int] | None = None) -> PartDetail:
    return PartDetail(name, value, weight, None if value is None else weight * value, "", span, "v")


def completion(index: int, reward: float | None, advantage: float, parts: list[PartDetail]) -> CompletionDetail:
    return CompletionDetail(index, "x", "stop", 3, 0, reward, reward, advantage, advantage, parts)


def group(rows: list[CompletionDetail]) -> GroupDetail:
    batch = BatchView(1, 1, "1-rl", 1, 1, len(rows), "runs/x")
    mean, std = mean_and_std([row.reward for row in rows])
    return GroupDetail(batch, 0, "1-0", "p", 0, "1+1=", "2", {}, None, mean, std, True, rows)


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
