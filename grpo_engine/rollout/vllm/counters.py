"""What vLLM servers count (GET /metrics, in Prometheus' text form) as metrics of ours. Needs no vLLM."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from grpo_engine.rollout.vllm.metrics import ACCEPTED, ACCEPTED_BY_DEPTH, DRAFTED, DRAFTS, SpeculationCounts

PROMPT_TOKENS = "vllm:prefix_cache_queries"
CACHED_TOKENS = "vllm:prefix_cache_hits"
LINE = re.compile(r"^(vllm:\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
WANTED = {DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_BY_DEPTH, PROMPT_TOKENS, CACHED_TOKENS}

Counters = Mapping[str, int]
"""Since the server began; positions of drafts stand behind a colon, such as `…_per_pos:0`."""


def read_counters(text: str) -> Counters:
    """Sums over the engines of one server.

    Example: read_counters('vllm:prefix_cache_hits_total{engine="0"} 128.0') == {"vllm:prefix_cache_hits": 128}
    """
    found: Counter[str] = Counter()
    for name, labels, value in LINE.findall(text):
        if name in WANTED:
            position = POSITION.search(labels)
            found[f"{name}:{position[1]}" if position else name] += int(float(value))
    return found


def counted(now: Counters, before: Counters) -> Counters:
    """What came between both; everything when the server was started anew in between."""
    if any(now.get(name, 0) < count for name, count in before.items()):
        return now
    return {name: count - before.get(name, 0) for name, count in now.items()}


def as_metrics(counts: Counters) -> dict[str, float]:
    """By names of the metric catalogue; empty where nothing was counted."""
    depths = sorted(int(name.rpartition(":")[2]) for name in counts if name.startswith(f"{ACCEPTED_BY_DEPTH}:"))
    accepted = tuple(counts[f"{ACCEPTED_BY_DEPTH}:{depth}"] for depth in depths)
    speculation = SpeculationCounts(counts.get(DRAFTS, 0), counts.get(DRAFTED, 0), counts.get(ACCEPTED, 0), accepted)
    metrics = speculation.since(SpeculationCounts())
    if counts.get(PROMPT_TOKENS):
        metrics["rollout/cached_prompt_share"] = counts.get(CACHED_TOKENS, 0) / counts[PROMPT_TOKENS]
    return metrics
