"""What the group page shows of one rollout row: marked text, the reward's sum and the advantage as arithmetic.

Rows are dicts with the columns of `grpo_engine.rollout_files.SCHEMA`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from app.formatting import fixed, number, signed

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
    weight: float
    explanation: str
    version: str

    @property
    def contribution(self) -> float | None:
        return None if self.value is None else self.weight * self.value

    @property
    def sum_text(self) -> str:
        """Example: "0.1 × 1.000 = +0.100"; an abstention is no zero."""
        if self.value is None:
            return "abstained, left out of the sum"
        return f"{number_plain(self.weight)} × {fixed(self.value)} = {signed(self.contribution, 3)}"


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

    @property
    def tone(self) -> str:
        return "good" if self.advantage > 0 else "bad" if self.advantage < 0 else "sub"


@dataclass(frozen=True)
class GroupView:
    prompt_id: str
    prompt_text: str
    gold: str | None
    columns: dict[str, Any]
    formula: str
    part_keys: list[tuple[str, str]]
    """Part's name and its colour class."""
    mean: float | None
    std: float | None
    advantage_formula: str
    dropped: str | None
    completions: list[CompletionView]
    best: int
    """Index of the completion with the highest reward."""


@dataclass(frozen=True)
class TokenView:
    text: str
    css: str
    title: str


def number_plain(value: float) -> str:
    """A weight as it was configured. Example: number_plain(0.1) == "0.1", number_plain(1.0) == "1.0"."""
    text = f"{value:g}"
    return (text if "." in text or "e" in text else f"{text}.0").replace("-", "−")


def segments(text: str, parts: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Text cut at the end of the reasoning and around the judged answer."""
    thought_end = text.rfind(END_OF_THOUGHT)
    thought_end = thought_end + len(END_OF_THOUGHT) if thought_end >= 0 else 0
    judged = next((p for p in parts if p["span_start"] is not None and p["name"] not in NO_ANSWER_PARTS), None)
    if judged is None:
        cuts = [Segment(text[:thought_end], "think"), Segment(text[thought_end:])]
        return [cut for cut in cuts if cut.text]
    start, end = max(0, judged["span_start"]), min(len(text), judged["span_end"])
    value = judged["value"]
    kind = "span" if value is None else "right" if value > 0 else "wrong"
    cuts = [
        Segment(text[: min(thought_end, start)], "think"),
        Segment(text[min(thought_end, start) : start]),
        Segment(text[start:end], kind, judged["explanation"] or judged["name"]),
        Segment(text[end : max(thought_end, end)], "think"),
        Segment(text[max(thought_end, end) :]),
    ]
    return [cut for cut in cuts if cut.text]


def group_view(rows: Sequence[Mapping[str, Any]], normalize_std: bool) -> GroupView:
    """One prompt's completions, ordered by index, as the group page shows them."""
    rows = sorted(rows, key=lambda row: int(row["completion_index"]))
    first = rows[0]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = fmean(rewards) if rewards else None
    std = stdev(rewards) if len(rewards) > 1 else None
    colours = {part["name"]: f"p{index % 6}" for index, part in enumerate(first["parts"])}
    bar_scale = max([1e-9, *(_bar_length(row) for row in rows)])
    widest = max([2.5, *(abs(row["advantage"] or 0.0) for row in rows)])
    completions = [_completion(row, colours, bar_scale, widest, mean, std, normalize_std) for row in rows]
    best = max(range(len(rows)), key=lambda i: -math.inf if rows[i]["reward"] is None else rows[i]["reward"])
    return GroupView(
        prompt_id=first["prompt_id"],
        prompt_text=first["prompt_text"],
        gold=first["gold"],
        columns=first.get("columns") or {},
        formula=_formula(first["parts"]),
        part_keys=list(colours.items()),
        mean=mean,
        std=std,
        advantage_formula=_advantage_formula(mean, std, normalize_std),
        dropped=first["dropped"],
        completions=completions,
        best=best,
    )


def _bar_length(row: Mapping[str, Any]) -> float:
    """Length of a row's bar: all weights at their full size, or more where a part exceeds 1."""
    return float(sum(abs(p["weight"]) * max(1.0, abs(p["value"] or 0.0)) for p in row["parts"]))


def _formula(parts: Sequence[Mapping[str, Any]]) -> str:
    """Example: "reward = 1.0·accuracy + 0.1·format − 0.02·length"."""
    text = ""
    for part in parts:
        sign = "−" if part["weight"] < 0 else "+"
        term = f"{number_plain(abs(part['weight']))}·{part['name']}"
        text += f" {sign} {term}" if text else (f"−{term}" if sign == "−" else term)
    return f"reward = {text}"


def _advantage_formula(mean: float | None, std: float | None, normalize_std: bool) -> str:
    if mean is None:
        return "no reward: every part abstained"
    if not std:
        return "all rewards are equal, so every advantage is 0"
    difference = f"reward − {fixed(mean)}" if mean >= 0 else f"reward + {fixed(-mean)}"
    return f"advantage = ({difference}) / {fixed(std)}" if normalize_std else f"advantage = {difference}"


def _completion(
    row: Mapping[str, Any],
    colours: Mapping[str, str],
    bar_scale: float,
    widest: float,
    mean: float | None,
    std: float | None,
    normalize_std: bool,
) -> CompletionView:
    parts = [
        PartView(p["name"], colours.get(p["name"], "p5"), p["value"], p["weight"], p["explanation"] or "", p["version"] or "")
        for p in row["parts"]
    ]
    advantage = float(row["advantage"] or 0.0)
    length = min(50.0, 50 * abs(advantage) / widest)
    return CompletionView(
        index=int(row["completion_index"]),
        num_tokens=int(row["num_tokens"]),
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        advantage=advantage,
        segments=segments(row["completion_text"], row["parts"]),
        parts=parts,
        bars=_bars(parts, bar_scale),
        sum_text=_sum_text(parts),
        advantage_bar=Bar(50 if advantage >= 0 else 50 - length, length, "pos" if advantage >= 0 else "neg", signed(advantage)),
        advantage_text=_advantage_text(row["reward"], mean, std, normalize_std, advantage),
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
    for part in parts:
        value = part.contribution
        if value is None:
            continue
        size = fixed(abs(value))
        text += f" {'−' if value < 0 else '+'} {size}" if text else (f"−{size}" if value < 0 else size)
    return text or "every part abstained"


def _advantage_text(reward: float | None, mean: float | None, std: float | None, normalize_std: bool, advantage: float) -> str:
    """Example: "(1.072 − 0.710) / 0.500 = +0.72"."""
    if reward is None or mean is None:
        return "no reward, so no advantage"
    if not std:
        return "equal rewards, so 0"
    difference = f"{fixed(reward)} {'−' if mean >= 0 else '+'} {fixed(abs(mean))}"
    left = f"({difference}) / {fixed(std)}" if normalize_std else difference
    return f"{left} = {signed(advantage)}"


def token_views(row: Mapping[str, Any]) -> list[TokenView]:
    """Tokens of one completion, darker the less likely they were when sampled."""
    refs: Sequence[float | None] = row["ref_logprobs"] or [None] * len(row["token_ids"])
    texts = row["token_texts"] or [str(token) for token in row["token_ids"]]
    views = []
    for text, logprob, full, ref, token in zip(texts, row["logprobs"], row["full_logprobs"], refs, row["token_ids"], strict=False):
        title = f"token {token}: log-probability {fixed(logprob)} nat, probability {number(math.exp(logprob))}"
        if full is not None and abs(full - logprob) > 1e-6:
            title += f"; untruncated {fixed(full)}"
        if ref is not None:
            title += f"; reference {fixed(ref)}"
        views.append(TokenView(text, f"lp{sum(logprob < bound for bound in LOGPROB_CLASSES)}", title))
    return views
