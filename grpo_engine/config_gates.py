"""Names of reward parts, and whether those that gate each other can. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_engine.config_rewards import RewardConfig


LEARNED = ("bertscore", "reward_model", "judge")
"""Kinds of reward parts that ask a model."""
OTHER_NAMES = {"answer_accuracy": "accuracy"}
"""What kinds of reward parts may also be called -> what configs store, charts show and hashes are made of."""


def under_own_kind(part: Any) -> Any:
    """A part as it was written, under its own kind."""
    kind = part.get("kind") if isinstance(part, Mapping) else None
    return {**part, "kind": OTHER_NAMES[kind]} if isinstance(kind, str) and kind in OTHER_NAMES else part


def part_names(parts: Sequence[RewardConfig]) -> list[str]:
    """Names of the parts, each once: ["accuracy", "format", "accuracy_2"]."""
    names: list[str] = []
    for part in parts:
        wanted = part.name if part.kind == "custom" else part.kind
        name, number = wanted, 2
        while name in names:
            name, number = f"{wanted}_{number}", number + 1
        names.append(name)
    return names


def learned_names(parts: Sequence[RewardConfig]) -> list[str]:
    """Names of the parts whose values a model gives."""
    return [name for part, name in zip(parts, part_names(parts), strict=True) if part.kind in LEARNED]


def check_gates(parts: Sequence[RewardConfig]) -> None:
    """Raises ValueError where a part is gated by none of the others, or gates lead back to where they began."""
    names = part_names(parts)
    gates = {name: part.gated_by for name, part in zip(names, parts, strict=True)}
    for index, (name, gate) in enumerate(gates.items()):
        where = f"rewards.{index}.gated_by"
        if gate is not None and (gate == name or gate not in gates):
            others = ", ".join(other for other in names if other != name) or "there is none"
            raise ValueError(f"{where} {gate!r} names no other part; parts beside it: {others}")
        path = [name]
        while (gate := gates[path[-1]]) is not None and gate in gates:
            path.append(gate)
            if gate == name:
                raise ValueError(f"{where}: the gates form a circle ({' by '.join(path)})")
            if len(path) > len(names):
                break
