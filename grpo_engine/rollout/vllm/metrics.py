"""vLLM's counters of speculation as metrics of ours. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Since the process began."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()

    def since(self, before: SpeculationCounts) -> dict[str, float]:
        """What came between both, by names of the metric catalogue; empty when nothing was drafted."""
        drafts = self.drafts - before.drafts
        drafted = self.drafted_tokens - before.drafted_tokens
        accepted = self.accepted_tokens - before.accepted_tokens
        if drafts == 0 or drafted == 0:
            return {}
        earlier = before.accepted_by_depth + (0,) * (len(self.accepted_by_depth) - len(before.accepted_by_depth))
        by_depth = zip(self.accepted_by_depth, earlier, strict=False)
        return {
            "rollout/drafted_tokens": float(drafted),
            "rollout/accepted_share": accepted / drafted,
            "rollout/draft_length_mean": drafted / drafts,
            "rollout/tokens_per_forward": 1 + accepted / drafts,
        } | {
            f"rollout/accepted_share_{depth}": (now - then) / drafts
            for depth, (now, then) in enumerate(by_depth, start=1)
        }


def speculation_counts(metrics: Iterable[Any]) -> SpeculationCounts:
    """From vLLM's `get_metrics`: objects with a name and a value or values."""
    by_name = {metric.name: metric for metric in metrics}

    def value(name: str) -> int:
        return int(by_name[name].value) if name in by_name else 0

    depths = tuple(by_name[ACCEPTED_BY_DEPTH].values) if ACCEPTED_BY_DEPTH in by_name else ()
    return SpeculationCounts(value(DRAFTS), value(DRAFTED), value(ACCEPTED), depths)
