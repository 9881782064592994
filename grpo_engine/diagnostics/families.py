"""Metrics that come in families, such as reward/part/<part>/mean, and what every metric's entry is. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Format = Literal["percent", "digits", "si", "integer", "seconds", "bytes", "scientific"]
"""percent: 0.42 -> 42 %; digits: three significant ones; si: 12.3 k; integer; seconds; bytes: GB; scientific: 1e-6."""
Direction = Literal["good", "bad", "neutral"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """Example: catalogue.METRICS["policy/entropy"].unit == "nats"."""

    label: str
    unit: str
    description: str
    group: str
    """Metrics of a group share a row of charts."""
    format: Format
    higher_is: Direction


_PART_MEAN = MetricInfo("", "", "Mean value of this reward part, before its weight.", "reward parts", "digits", "good")
_PART_ABSTAINED = MetricInfo(
    "", "", "Share of completions that this reward part did not judge.", "reward parts", "percent", "bad"
)
_PART_SPREAD = MetricInfo(
    "", "", "Standard deviation of this reward part within groups: how much of the advantage is its opinion.",
    "reward parts", "digits", "neutral",
)  # fmt: skip
_BEHAVIOUR = MetricInfo(
    "", "a completion", "How often a completion does this, by the phrases that announce it; never part of the reward.",
    "behaviour", "digits", "neutral",
)  # fmt: skip
_ACCEPTED_AT = MetricInfo(
    "", "", "Share of drafts of at least this length whose token in this place was accepted with all before it.",
    "rollout", "percent", "good",
)  # fmt: skip
_DRAFTS_OF = MetricInfo("", "", "Share of decoding steps with drafts of this length.", "rollout", "percent", "neutral")
_MTP_LOSS = MetricInfo(
    "", "nats", "Cross entropy of the prediction head that guesses this many tokens beyond the next one.",
    "mtp", "digits", "bad",
)  # fmt: skip
_MTP_ACCURACY = MetricInfo(
    "", "", "Share of trained tokens that the prediction head's first guess met, this many beyond the next one.",
    "mtp", "percent", "good",
)  # fmt: skip
_GRADIENT_OF_POSITIONS = MetricInfo(
    "", "", "Squared gradient norm of the hidden states at these completion positions; fading ones learn little.",
    "gradient by position", "scientific", "neutral",
)  # fmt: skip


def of_family(name: str) -> MetricInfo | None:
    """The entry of reward/part/<part>/mean, …/abstained_share, …/spread, behaviour/<name>,
    gradient/position/<first>-<last>, mtp/loss_<depth>, mtp/accuracy_<depth>, rollout/accepted_share_<place> and
    rollout/draft_length_share_<length>."""
    match name.split("/"):
        case ["reward", "part", part, "mean"]:
            return replace(_PART_MEAN, label=f"Part {part}")
        case ["reward", "part", part, "abstained_share"]:
            return replace(_PART_ABSTAINED, label=f"Part {part}, abstained")
        case ["reward", "part", part, "spread"]:
            return replace(_PART_SPREAD, label=f"Part {part}, spread")
        case ["behaviour", name]:
            return replace(_BEHAVIOUR, label=name.replace("_", " ").capitalize())
        case ["mtp", numbered] if numbered.startswith("loss_"):
            return replace(_MTP_LOSS, label=f"Prediction head {numbered.rpartition('_')[2]}, loss")
        case ["mtp", numbered] if numbered.startswith("accuracy_"):
            return replace(_MTP_ACCURACY, label=f"Prediction head {numbered.rpartition('_')[2]}, accuracy")
        case ["gradient", "position", span]:
            return replace(_GRADIENT_OF_POSITIONS, label=f"Gradient, tokens {span.replace('-', '–')}")
        case ["rollout", numbered] if numbered.startswith("accepted_share_"):
            return replace(_ACCEPTED_AT, label=f"Accepted, token {numbered.rpartition('_')[2]}")
        case ["rollout", numbered] if numbered.startswith("draft_length_share_"):
            return replace(_DRAFTS_OF, label=f"Drafts of {numbered.rpartition('_')[2]}")
    return None
