"""How completions are sampled: the backend, its drafts and what they bring, the weights' way to the sampler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.form_nodes import kind_label
from app.formatting import number, percent
from app.metrics.display import display
from app.models import Run
from grpo_engine.config_rollout import MTPConfig, TorchRollout
from grpo_engine.diagnostics.catalogue import info

MAX_WRITTEN = 8
"""Columns that have room for their share above them; of more only the picture is drawn."""
TOLERANCE_NATS = {"float32": 0.001, "bfloat16": 0.25}
"""Largest probe gap by compute type where the config names none; as ProbeConfig.tolerance_nats says."""
FACTS = (
    "rollout/tokens_per_forward", "rollout/draft_gain", "rollout/accepted_share", "rollout/slot_use_share",
    "rollout/straggler_rows", "rollout/cached_prompt_share", "rollout/servers_ready", "rollout/requests_retried",
    "rollout/sync_s", "rollout/probe_gap_nats", "rollout/weight_updates_repeated",
)  # fmt: skip
"""What the card writes out when the run has it, in this order."""


@dataclass(frozen=True)
class Fact:
    label: str
    text: str
    title: str
    tone: str = ""
    """good, warn or empty; the text says the same."""


@dataclass(frozen=True)
class Column:
    """One column of a small histogram."""

    label: str
    share: float
    text: str
    title: str


@dataclass(frozen=True)
class Histogram:
    title: str
    help: str
    columns: list[Column]

    @property
    def spoken(self) -> str:
        return f"{self.title}: " + ", ".join(f"{column.label} {column.text}" for column in self.columns)

    @property
    def written(self) -> bool:
        return len(self.columns) <= MAX_WRITTEN


@dataclass(frozen=True)
class RolloutCard:
    backend: str
    """Example: "own decoder"."""
    plan: list[Fact]
    """What the config asks for."""
    facts: list[Fact]
    """What the newest step measured."""
    histograms: list[Histogram]
    waiting_text: str
    """What will appear, while nothing was measured; else empty."""


def rollout_card(
    run: Run, stage: str, latest: Mapping[str, float], sync: Mapping[str, Any] | None = None
) -> RolloutCard | None:
    """None when the run samples nothing and has no heads that could draft. `latest`: finite metrics of the newest
    step of the stage shown; `sync`: the run's newest `weight_sync` event."""
    config = _completed(run.config)
    if not has_sampling(config) and not config["mtp"]["depth"]:
        return None
    histograms = [found for found in _histograms(latest) if found.columns]
    facts = [_fact(name, latest[name], config) for name in FACTS if name in latest]
    facts += [_sent(sync)] if sync and facts else []
    waiting = "" if facts or histograms else _waiting(stage)
    return RolloutCard(backend_text(config), _plan(config), facts, histograms, waiting)


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs of earlier versions have no rollout section; their defaults are what they did."""
    defaults = {"rollout": TorchRollout().model_dump(mode="json"), "mtp": MTPConfig().model_dump(mode="json")}
    return {**defaults, **config}


def has_sampling(config: Mapping[str, Any]) -> bool:
    return any(stage["kind"] != "sft" for stage in config["stages"])


def _waiting(stage: str) -> str:
    if stage.endswith("-sft"):
        return (
            "This stage samples nothing. Tokens a forward, drafts and weight updates appear with the next stage's "
            "first batch."
        )
    return "Tokens a forward, drafts, acceptance and weight updates appear here with the first sampled batch."


# ---------------------------------------------------------------- what the config asks for
def backend_text(config: Mapping[str, Any]) -> str:
    """Example: "2 vLLM servers, given by address"."""
    rollout = config["rollout"]
    if rollout["backend"] != "vllm_server":
        return kind_label(rollout["backend"])
    count = len(rollout["addresses"]) or rollout["num_servers"]
    whose = "given by address" if rollout["addresses"] else "started by each rank"
    return f"{count} vLLM {'server' if count == 1 else 'servers'}, {whose}"


def _plan(config: Mapping[str, Any]) -> list[Fact]:
    title = "Guessed tokens are verified in one forward pass and accepted by exact rejection sampling."
    found = [Fact("drafts", drafts_text(config), title)]
    depth = config["mtp"]["depth"]
    if depth:
        found.append(
            Fact("MTP heads", f"{depth} deep", "Blocks that predict further tokens; they never change the policy.")
        )
    return found


def drafts_text(config: Mapping[str, Any]) -> str:
    """Example: "MTP heads, 2–5 or none"."""
    rollout = config["rollout"]
    if rollout["backend"] != "torch":
        speculation = rollout["speculation"]
        return f"{kind_label(speculation['method'])}, {speculation['num_tokens']}" if speculation else "none"
    drafts = rollout["drafts"]
    if drafts["kind"] == "none":
        return "none"
    fixed = drafts["fixed_tokens"] or (drafts["min_tokens"] if config["deterministic"] else None)
    low, high = drafts["min_tokens"], drafts["max_tokens"]
    span = f"{low}" if low == high else f"{low}–{high}"
    length = f"always {fixed}" if fixed else f"{span} or none" if drafts["allow_zero"] else span
    return f"{kind_label(drafts['kind'])}, {length}"


# ---------------------------------------------------------------- what was measured
def _fact(name: str, value: float, config: Mapping[str, Any]) -> Fact:
    about = info(name)
    text, tone = " ".join(display(name, value)).strip(), ""
    if name == "rollout/draft_gain":
        text, tone = f"{number(value)} ×", ""
        if value < 1:
            text, tone = f"{text}, slower than plain", "warn"
    if name == "rollout/probe_gap_nats":
        limit = probe_tolerance(config)
        tone = "warn" if value > limit else ""
        text = f"{number(value)} nats, {'above' if value > limit else 'limit'} {number(limit)}"
    if name == "rollout/requests_retried" and value:
        text, tone = f"{value:,.0f}, their server failed", "warn"
    if name == "rollout/weight_updates_repeated" and value:
        text, tone = f"{value:.0f}, the probe failed once", "warn"
    return Fact(about.label.lower(), text, about.description, tone)


def _sent(sync: Mapping[str, Any]) -> Fact:
    title = f"checksum {sync['checksum']} over names, shapes and bits of the weights sent last"
    return Fact("sampler holds", f"version {sync['policy_version']}", title)


def probe_tolerance(config: Mapping[str, Any]) -> float:
    """Nats. Only for backends that are probed."""
    given = config["rollout"].get("probe", {}).get("tolerance_nats")
    return float(given or TOLERANCE_NATS[config["dtype"]])


def _histograms(latest: Mapping[str, float]) -> list[Histogram]:
    lengths = _columns(latest, r"rollout/draft_length_share_(\d+)", "of steps drafted {label}")
    accepted = _columns(
        latest, r"rollout/accepted_share_(\d+)", "of drafts that long were accepted up to token {label}"
    )
    heads = _columns(latest, r"mtp/accuracy_(\d+)", "of trained tokens were the first guess of head {label}")
    return [
        Histogram("draft length", "Share of decoding steps by the number of tokens drafted.", lengths),
        Histogram(
            "accepted up to token", "Share of drafts at least so long of which the policy took so much.", accepted
        ),
        Histogram("heads right", "Share of trained tokens that each MTP head guessed first.", heads),
    ]


def _columns(latest: Mapping[str, float], pattern: str, words: str) -> list[Column]:
    """Columns of one family of metrics in the order of its numbers."""
    found = ((re.fullmatch(pattern, name), value) for name, value in latest.items())
    numbered: Iterable[tuple[int, float]] = sorted((int(match[1]), value) for match, value in found if match)
    return [
        Column(str(place), min(1.0, max(0.0, share)), percent(share), f"{percent(share)} {words.format(label=place)}")
        for place, share in numbered
    ]
