"""What the group page shows of a group: marked text, the reward's sum and the advantage as arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.formatting import fixed, number, signed
from app.rollouts import advantages
from app.rollouts.service import CompletionDetail, GroupDetail, PartDetail
from app.rollouts.tokens import TokenDetail

END_OF_THOUGHT = "</think>"
NO_ANSWER_PARTS = ("format", "length")
LOGPROB_CLASSES = (-0.05, -0.25, -0.7, -1.6, -3.0)
"""A token less likely than exp(bound) falls into the next darker class."""


@dataclass(frozen=True)
class Segment:
    text: str
    kind: str = "plain"
    """plain, think, right, wrong or span."""
    title: str = ""


@dataclass(frozen=True)
class Bar:
    """One rectangle of a bar that is 100 wide."""

    x: float
    width: float
    css: str
    title: str


@dataclass(frozen=True)
class PartView:
    name: str
    css: str
    value: float | None
    counted: float | None
    """What the value counts as, after clip and gate."""
    weight: float
    explanation: str
    version: str

    @property
    def contribution(self) -> float | None:
        return None if self.counted is None else self.weight * self.counted

    @property
    def sum_text(self) -> str:
        """Example: "0.1 × 1.000 = +0.100"; an abstention is no zero."""
        if self.counted is None:
            return "abstained, left out of the sum"
        changed = "" if self.counted == self.value else f" (its value {fixed(self.value)} was gated or clipped)"
        return f"{number_plain(self.weight)} × {fixed(self.counted)} = {signed(self.contribution, 3)}{changed}"


@dataclass(frozen=True)
class CompletionView:
    index: int
    num_tokens: int
    finish_reason: str
    reward: float | None
    advantage: float
    segments: list[Segment]
    parts: list[PartView]
    bars: list[Bar]
    sum_text: str
    advantage_bar: Bar
    advantage_text: str
    shaping_text: str
    """Example: "1.094 − 0.034 = 1.060"; empty where the reward itself was used."""

    @property
    def tone(self) -> str:
        return "good" if self.advantage > 0 else "bad" if self.advantage < 0 else "sub"


@dataclass(frozen=True)
class GroupView:
    formula: str
    part_keys: list[tuple[str, str]]
    """Part's name and its colour class."""
    advantage_formula: str
    shaping_formula: str
    dropped_text: str
    completions: list[CompletionView]
    best: int
    """Index of the completion with the highest reward."""


@dataclass(frozen=True)
class TokenView:
    text: str
    css: str
    title: str
    tone: str = ""
    """PPO: up or down, the sign of the token's own advantage."""


def number_plain(value: float) -> str:
    """A weight as it was configured. Example: number_plain(0.1) == "0.1", number_plain(1.0) == "1.0"."""
    text = f"{value:g}"
    return (text if "." in text or "e" in text else f"{text}.0").replace("-", "−")


def segments(text: str, parts: Sequence[PartDetail]) -> list[Segment]:
    """Text cut at the end of the reasoning and around the judged answer; the pieces always add up to the text."""
    thought_end = text.rfind(END_OF_THOUGHT)
    thought_end = thought_end + len(END_OF_THOUGHT) if thought_end >= 0 else 0
    judged = next((part for part in parts if part.span is not None and part.name not in NO_ANSWER_PARTS), None)
    if judged is None or judged.span is None:
        cuts = [Segment(text[:thought_end], "think"), Segment(text[thought_end:])]
        return [cut for cut in cuts if cut.text]
    start, end = max(0, judged.span[0]), min(len(text), judged.span[1])
    kind = "span" if judged.value is None else "right" if judged.value > 0 else "wrong"
    cuts = [
        Segment(text[: min(thought_end, start)], "think"),
        Segment(text[min(thought_end, start) : start]),
        Segment(text[start:end], kind, judged.explanation or judged.name),
        Segment(text[end : max(thought_end, end)], "think"),
        Segment(text[max(thought_end, end) :]),
    ]
    return [cut for cut in cuts if cut.text]


def group_view(group: GroupDetail) -> GroupView:
    """One prompt's completions as the group page shows them."""
    rows = group.completions
    colours = {part.name: f"p{index % 6}" for index, part in enumerate(rows[0].parts)}
    scale = max([1e-9, *(_bar_length(row) for row in rows)])
    widest = max([2.5, *(abs(row.advantage or 0.0) for row in rows)])
    rewards = [-math.inf if row.reward is None else row.reward for row in rows]
    return GroupView(
        formula=_formula(rows[0].parts),
        part_keys=list(colours.items()),
        advantage_formula=advantages.formula(group),
        shaping_formula=advantages.shaping_formula(group),
        dropped_text=advantages.dropped_text(group.dropped),
        completions=[_completion(group, row, colours, scale, widest) for row in rows],
        best=rows[rewards.index(max(rewards))].index,
    )


def _bar_length(row: CompletionDetail) -> float:
    """Length of a row's bar: all weights at their full size, or more where a part exceeds 1."""
    return sum(abs(part.weight) * max(1.0, abs(part.counted or 0.0)) for part in row.parts)


def _formula(parts: Sequence[PartDetail]) -> str:
    """Example: "reward = 1.0·accuracy + 0.1·format − 0.02·length"."""
    text = ""
    for part in parts:
        term = f"{number_plain(abs(part.weight))}·{part.name}"
        text += (f" {_sign(part.weight)} " if text else "−" if part.weight < 0 else "") + term
    return f"reward = {text}"


def _sign(value: float) -> str:
    return "−" if value < 0 else "+"


def _completion(
    group: GroupDetail, row: CompletionDetail, colours: Mapping[str, str], scale: float, widest: float
) -> CompletionView:
    parts = [
        PartView(p.name, colours.get(p.name, "p5"), p.value, p.counted, p.weight, p.explanation, p.version)
        for p in row.parts
    ]
    advantage = row.advantage or 0.0
    length = min(50.0, 50 * abs(advantage) / widest)
    bar = Bar(50 if advantage >= 0 else 50 - length, length, "pos" if advantage >= 0 else "neg", signed(advantage))
    return CompletionView(
        index=row.index,
        num_tokens=row.num_tokens,
        finish_reason=row.finish_reason,
        reward=row.reward,
        advantage=advantage,
        segments=segments(row.text, row.parts),
        parts=parts,
        bars=_bars(parts, scale),
        sum_text=_sum_text(parts),
        advantage_bar=bar,
        advantage_text=advantages.text(group, row),
        shaping_text=advantages.shaping_text(row),
    )


def _bars(parts: Sequence[PartView], scale: float) -> list[Bar]:
    bars, x = [], 0.0
    for part in parts:
        width = 100 * abs(part.contribution or 0.0) / scale
        if width:
            bars.append(Bar(round(x, 2), round(width, 2), part.css, f"{part.name}: {part.sum_text}"))
        x += width
    return bars


def _sum_text(parts: Sequence[PartView]) -> str:
    """Contributions with their signs. Example: "1.000 + 0.100 − 0.028"."""
    text = ""
    for value in (part.contribution for part in parts if part.contribution is not None):
        text += (f" {_sign(value)} " if text else "−" if value < 0 else "") + fixed(abs(value))
    return text or "every part abstained"


def token_views(tokens: Sequence[TokenDetail]) -> list[TokenView]:
    """Tokens of one completion, darker the less likely they were when sampled."""
    return [
        TokenView(token.text or f"[{token.id}]", _token_class(token.logprob), _token_title(token), _token_tone(token))
        for token in tokens
    ]


def _token_tone(token: TokenDetail) -> str:
    return "" if not token.advantage else "up" if token.advantage > 0 else "down"


def _token_class(logprob: float | None) -> str:
    return "lp0" if logprob is None else f"lp{sum(logprob < bound for bound in LOGPROB_CLASSES)}"


def _token_title(token: TokenDetail) -> str:
    if token.logprob is None:
        return f"token {token.id}: log-probability {token.nonfinite.get('logprob', 'unknown')}"
    title = (
        f"token {token.id}: log-probability {fixed(token.logprob)} nat, probability {number(math.exp(token.logprob))}"
    )
    if token.full_logprob is not None and abs(token.full_logprob - token.logprob) > 1e-6:
        title += f"; untruncated {fixed(token.full_logprob)}"
    if token.ref_logprob is not None:
        title += f"; reference {fixed(token.ref_logprob)}"
    if token.advantage is not None:
        title += f"; advantage {signed(token.advantage, 3)}"
    if token.value is not None:
        title += f", value {fixed(token.value)}"
    if token.value_target is not None:
        title += f", return {fixed(token.value_target)}"
    return title
