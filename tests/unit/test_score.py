"""Completions scored from JSON to JSON, as the playground asks for it."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from typing import Any

import pytest

from grpo_engine.score import main

REWARDS: list[dict[str, Any]] = [
    {"kind": "accuracy", "compare": "number", "gated_by": "format"}, {"kind": "format", "weight": 0.1}
]  # fmt: skip


def asked(request: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    status = main(Namespace())
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, answer


def test_every_part_its_explanation_and_the_sum_come_back(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    row = {"prompt": "2+3=", "columns": {"answer": "5"}}
    items = [row | {"completion": text} for text in ("<think>wait, 2+3</think>5", "5")]
    status, answer = asked({"config": {"rewards": REWARDS}, "items": items}, monkeypatch, capsys)
    assert status == 0
    good, bare = answer["items"]
    assert (good["reward"], bare["reward"]) == (1.1, 0.0)
    assert [(part["name"], part["value"], part["counted"]) for part in bare["parts"]] == [
        ("accuracy", 1.0, 0.0), ("format", 0.0, 0.0)
    ]  # fmt: skip
    assert good["parts"][0]["explanation"]
    assert good["parts"][0]["span"] == [24, 25]
    assert good["behaviours"]["reflection"] == 1


def test_items_of_one_prompt_are_normalised_together(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rewards = [{"kind": "accuracy", "compare": "number", "normalize": "group"}]
    items = [
        {"prompt": p, "columns": {"answer": "5"}, "completion": text}
        for p, text in (("a", "5"), ("a", "6"), ("b", "5"))
    ]
    _, answer = asked({"config": {"rewards": rewards}, "items": items}, monkeypatch, capsys)
    assert [item["shaped_reward"] for item in answer["items"]] == [1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("config", "word"),
    [({"rewards": []}, "at least 1"), ({"rewards": [{"kind": "accuracy", "gated_by": "x"}]}, "no other part"),
     ({"rewards": [{"kind": "custom", "name": "mine"}]}, "no source"), ({"rewards": [{"kind": "gym"}]}, "gym")],
)  # fmt: skip
def test_what_cannot_be_scored_is_told_with_status_2(
    config: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    status, answer = asked({"config": config, "items": [{"completion": "5"}]}, monkeypatch, capsys)
    assert status == 2
    assert word in answer["problems"][0]["message"]
