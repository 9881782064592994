"""Oracle tables of the reward metrics, and the records that a judge reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_engine.reward.metric import Judgement
from grpo_engine.types import Completion, Prompt

CASES = Path(__file__).with_name("data") / "rewards"


def cases_of(kind: str) -> list[Any]:
    """The cases of tests/data/rewards/<kind>.yaml as pytest parameters; `name` is a case's id, the rest its dict."""
    rows = yaml.safe_load((CASES / f"{kind}.yaml").read_text(encoding="utf-8"))
    return [pytest.param({key: row[key] for key in row if key != "name"}, id=row["name"]) for row in rows]


def prompt(text: str = "Question", **columns: Any) -> Prompt:
    return Prompt("p", 0, text, [1, 2], columns)


def completion(text: str, num_tokens: int = 3) -> Completion:
    return Completion([7] * num_tokens, text, "stop", [-0.1] * num_tokens, [-0.1] * num_tokens)


def check_range(case: dict[str, Any], said: Judgement) -> None:
    """The value lies from the case's at_least to its at_most (at_least null = abstains), and `says` is explained."""
    if case.get("at_least", 0) is None:
        assert said.value is None, said.explanation
    else:
        assert said.value is not None, said.explanation
        assert case.get("at_least", 0) <= said.value <= case.get("at_most", 1), said
    assert case.get("says", "") in said.explanation
    assert len(said.explanation) > 10
