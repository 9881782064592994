"""Behaviours: counted by their phrases, whole words only, in a time that hostile texts do not decide."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.reward.behaviours import BEHAVIOURS, PHRASES, count_behaviours
from tests.reward_cases import cases_of


@pytest.mark.parametrize("case", cases_of("behaviours"))
def test_the_behaviours_of_a_text(case: dict[str, Any]) -> None:
    assert count_behaviours(case["text"]) == {name: case["counts"].get(name, 0) for name in BEHAVIOURS}


@pytest.mark.parametrize("name", PHRASES)
def test_every_phrase_is_found_where_it_stands_alone(name: str) -> None:
    assert [phrase for phrase in PHRASES[name] if not count_behaviours(f"So: {phrase.capitalize()}.")[name]] == []


def test_counts_add_up_over_paragraphs() -> None:
    text = "Wait, that's wrong. Let me check. Alternatively, factor it."
    assert count_behaviours("\n\n".join([text] * 5)) == {k: 5 * n for k, n in count_behaviours(text).items()}
