"""Prompts of reasoning-gym."""

from __future__ import annotations

import json
from typing import Any

import pytest
import reasoning_gym

from grpo_engine.config import ReasoningGymData
from grpo_engine.data.gym import GymSource
from grpo_engine.data.rendering import Renderer
from grpo_engine.data.sources import open_source
from grpo_engine.errors import DataError, InvalidConfig, Problem
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.protocols import PromptSource

TOKENIZER = character_tokenizer()
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(task: str = "chain_sum", *, seed: int = 0, demonstrations: bool = False, **settings: Any) -> PromptSource:
    config = ReasoningGymData(task=task, chat_template=False, **settings)
    return open_source(config, TOKENIZER, seed=seed, demonstrations=demonstrations, field="stages.0.data")


def test_items_carry_what_the_tasks_own_scorer_needs() -> None:
    prompts = gym(size=50).take(0, 60)
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    for prompt in prompts:
        columns = json.loads(json.dumps(prompt.columns, allow_nan=False))
        assert prompt.text == columns["question"]
        assert score(columns["answer"], columns) == 1.0
        assert score("nonsense", columns) < 1.0


def test_the_last_tenth_is_held_out_and_its_questions_are_never_taken() -> None:
    source = gym(size=100, options=SUMS)
    held = {prompt.text for prompt in source.held_out(256)}
    assert len(source.held_out(256)) == 10
    assert source.size == 90
    assert not held & {prompt.text for prompt in source.take(0, 450)}


class OneQuestion:
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "1+1=", "answer": "2", "metadata": {}}


def test_a_task_with_too_few_questions_is_explained() -> None:
    renderer = Renderer(TOKENIZER, system_prompt=None, chat_template=False)
    source = GymSource(ReasoningGymData(task="chain_sum", size=20), OneQuestion(), renderer, seed=0)
    with pytest.raises(DataError, match=r"all 18 training items of chain_sum .* widen its options"):
        source.take(0, 1)


def test_the_seed_orders_the_items_and_does_not_change_them() -> None:
    first, second = (gym(seed=seed, size=40).take(0, 36) for seed in (0, 1))
    assert [prompt.id for prompt in first] != [prompt.id for prompt in second]
    assert gym(seed=0, size=40).held_out(4) == gym(seed=1, size=40).held_out(4)


def test_any_window_equals_the_same_part_of_one_long_read() -> None:
    whole = gym(size=20).take(0, 60)
    assert gym(size=20).take(17, 3) == whole[17:20]


def problems(task: str, **settings: Any) -> list[Problem]:
    with pytest.raises(InvalidConfig) as caught:
        gym(task, **settings)
    return caught.value.problems


def test_an_unknown_task_gets_close_names() -> None:
    (problem,) = problems("chain_sums")
    assert (problem.field, problem.value) == ("stages.0.data.task", "chain_sums")
    assert "chain_sum" in problem.remedy


def test_unknown_options_are_each_named_with_the_known_ones() -> None:
    first, second = problems("chain_sum", options={"min_term": 2, "seed": 5})
    assert (first.field, second.field) == ("stages.0.data.options.min_term", "stages.0.data.options.seed")
    assert "min_terms" in first.remedy


def test_options_that_the_task_refuses_are_explained() -> None:
    (problem,) = problems("chain_sum", options={"min_terms": -1})
    assert problem.field == "stages.0.data.options"
    assert "min_terms must be positive" in problem.message


def test_there_are_no_demonstrations() -> None:
    with pytest.raises(DataError, match="no demonstrations for SFT"):
        gym(demonstrations=True)
