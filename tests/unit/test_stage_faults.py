"""What reward parts could not judge is told once a kind; how much parts disagree is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_engine.pipeline.synchronous import Batch
from grpo_engine.stages.agreement import uncertainty
from grpo_engine.stages.faults import tell_faults
from grpo_engine.types import Group, RewardFault, RewardPart
from tests.unit.stage_fakes import Listening, batch_of, context_of, rl_stage

OOPS = RewardFault("mine", "ValueError in line 3", "mine failed: ValueError: bad day (line 3).")


def with_parts(*tables: dict[str, list[float | None]], weight: float = 1.0) -> list[Group]:
    """A group a table; the last part of each has `weight`."""
    groups = []
    for group, table in zip(batch_of(len(tables)).groups, tables, strict=True):
        weights = [1.0] * (len(table) - 1) + [weight]
        rows = [
            [RewardPart(name, values[row], each) for (name, values), each in zip(table.items(), weights, strict=True)]
            for row in range(len(next(iter(table.values()))))
        ]
        groups.append(replace(group, rollouts=[replace(group.rollouts[0], parts=row) for row in rows]))
    return groups


def told(folder: Path, *batches: Batch) -> Listening:
    context, seen = context_of(rl_stage(), folder), set[tuple[str, str]]()
    for batch in batches:
        tell_faults(context, batch, seen)
    assert isinstance(context.journal, Listening)
    return context.journal


def test_a_fault_is_a_finding_once_a_kind(tmp_path: Path) -> None:
    other = replace(OOPS, kind="too late")
    first, second = replace(batch_of(1), faults=[OOPS, OOPS]), replace(batch_of(1), faults=[OOPS, other])
    findings = told(tmp_path, first, second).of("finding")
    assert [finding.detector for finding in findings] == ["reward_fault/mine"] * 2
    assert findings[0].title == "The reward part mine could not judge (ValueError in line 3)."
    assert findings[0].evidence == OOPS.message


def test_a_part_that_judges_nothing_is_warned_of_once_unless_its_fault_was_told(tmp_path: Path) -> None:
    silent = replace(batch_of(1), groups=with_parts({"mine": [None, None], "format": [1.0, None]}))
    assert len(told(tmp_path, silent, silent).of("warning")) == 1
    assert told(tmp_path, replace(silent, faults=[OOPS])).of("warning") == []


def test_parts_that_order_alike_agree_and_parts_that_order_against_each_other_do_not() -> None:
    up: list[float | None] = [0.0, 0.5, 1.0]
    assert uncertainty(with_parts({"a": up, "b": [3.0, 4.0, 9.0]}))["reward/part_disagreement"] == 0.0
    assert uncertainty(with_parts({"a": up, "b": up[::-1]}))["reward/part_disagreement"] == 1.0
    assert uncertainty(with_parts({"a": up, "b": up[::-1]}, weight=-0.1))["reward/part_disagreement"] == 0.0


def test_ties_and_abstentions_have_no_opinion() -> None:
    values = uncertainty(with_parts({"a": [0.0, 0.0, 1.0, None], "b": [1.0, 0.0, 1.0, 5.0]}))
    assert values["reward/part_disagreement"] == 0.0  # only the second and third differ in both
    assert "reward/part_disagreement" not in uncertainty(with_parts({"a": [0.0, 1.0], "b": [1.0, 1.0]}))
    assert "reward/part_disagreement" not in uncertainty(with_parts({"a": [0.0, 1.0]}))


def test_a_group_without_completions_says_nothing() -> None:
    first, second = with_parts({"a": [0.0, 1.0]}, {"a": [0.0, 1.0]})
    assert uncertainty([replace(first, rollouts=[]), second]) == uncertainty([second])


def test_the_spread_of_a_part_is_its_deviation_within_groups() -> None:
    values = uncertainty(with_parts({"judge": [0.0, 1.0]}, {"judge": [9.0, 9.0]}, {"judge": [4.0, None]}))
    assert values["reward/part/judge/spread"] == pytest.approx((0.25 / 2) ** 0.5)
