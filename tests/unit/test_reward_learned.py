"""Learned parts over stand-ins for the models: what is asked, and what becomes of the answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.checks.report import Report
from grpo_engine.checks.reward_needs import check_models
from grpo_engine.config import RLStage
from grpo_engine.config_gates import learned_names
from grpo_engine.config_rewards import AccuracyReward, BertScoreReward, JudgeReward, RewardModelReward
from grpo_engine.learned_rewards import LearnedRewards, earlier_answers
from grpo_engine.preference_accuracy import pairs_of, preference_accuracy
from grpo_engine.reward.learned.bertscore import BertScore, gold_texts, match
from grpo_engine.reward.learned.judge import Judge
from grpo_engine.reward.learned.reward_model import RewardModelPart, sigmoid
from grpo_engine.reward.learned.texts import question_of
from grpo_engine.stages.agreement import learned_spread
from grpo_engine.types import Group, Prompt, RewardPart, Rollout, TextScore, TextVectors
from tests.reward_cases import completion, prompt


class Letters:
    """An encoder with one dimension a letter; reads 20 characters."""

    version = "letters"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> list[TextVectors]:
        self.calls.append(list(texts))
        rows = [[np.eye(128, dtype=np.float32)[min(ord(c), 127)] for c in text[:20] if c != " "] for text in texts]
        return [
            TextVectors(np.array(row, dtype=np.float32).reshape(-1, 128), len(text) > 20)
            for row, text in zip(rows, texts, strict=True)
        ]


class Lengths:
    """A reward model that likes long answers."""

    version = "lengths"

    def __init__(self, score: float | None = None) -> None:
        self.score, self.asked = score, list[tuple[str, str]]()

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[TextScore]:
        self.asked += pairs
        return [TextScore(float(len(a)) if self.score is None else self.score, len(q), len(a) > 50) for q, a in pairs]


# ---------------------------------------------------------------- bertscore
def bertscore(gold: Any, *answers: str, encoder: Letters | None = None, max_rows: int = 32) -> list[RewardPart]:
    part = BertScore(BertScoreReward(model="m", max_rows=max_rows), encoder or Letters())
    return part.score([prompt(answer=gold)] * len(answers), [completion(text) for text in answers])


def test_precision_and_recall_are_told_apart() -> None:
    [part] = bertscore("abcd", "ab")
    assert part.value == pytest.approx(2 / 3)
    assert "precision 1.000, recall 0.500" in part.explanation
    assert part.span == (0, 2)


def test_an_empty_answer_gets_0_and_a_row_without_gold_abstains() -> None:
    assert [part.value for part in bertscore("abc", "", "<think>abc</think>", "<think>abc")] == [0.0] * 3
    assert [bertscore(gold, "abc")[0].value for gold in (None, "", " ", [], True)] == [None] * 5
    assert "column answer holds no text" in bertscore(None, "abc")[0].explanation


def test_of_several_gold_texts_the_best_counts() -> None:
    [part] = bertscore(["xyz", "abc", 7], "abc")
    assert part.value == 1.0
    assert "the best of 3 gold texts" in part.explanation


def test_a_text_that_was_cut_is_told() -> None:
    assert "The answer is longer" in bertscore("aaa", "a" * 21)[0].explanation
    assert "The gold text is longer" in bertscore("a" * 21, "aaa")[0].explanation


def test_equal_texts_are_embedded_once_and_no_more_rows_at_a_time_than_asked() -> None:
    encoder = Letters()
    bertscore("gold", "a", "a", "b", encoder=encoder, max_rows=2)
    assert encoder.calls == [["a", "gold"], ["b", "gold"]]


@settings(max_examples=30)
@given(st.text("abc ", max_size=12), st.text("abc ", max_size=12))
def test_the_score_is_bounded_symmetric_and_1_only_for_texts_of_the_same_tokens(first: str, second: str) -> None:
    a, b = Letters().embed([first, second])
    f1, precision, recall = match(a.vectors, b.vectors)
    assert 0 <= f1 <= 1
    assert match(b.vectors, a.vectors) == (f1, recall, precision)
    assert (f1 == 1) == (set(first) - {" "} == set(second) - {" "} != set())


def test_opposite_vectors_get_0_and_not_less() -> None:
    one = np.ones((1, 4), dtype=np.float32)
    assert match(one, -one)[0] == 0.0


def test_numbers_are_gold_texts_and_truth_values_are_not() -> None:
    assert gold_texts(["a ", 2, 0.5, True, None, " "]) == ["a", "2", "0.5"]


# ---------------------------------------------------------------- reward model
def scored(scorer: Lengths, *texts: str, **changes: Any) -> list[RewardPart]:
    part = RewardModelPart(RewardModelReward(model="m", **changes), scorer)
    asked = Prompt("p", 0, "<user>Why?<model><think>", [1], {"prompt": "Why?"})
    return part.score([asked] * len(texts), [completion(text) for text in texts])


def test_a_score_is_squashed_or_kept() -> None:
    assert scored(Lengths(0.0), "so")[0].value == 0.5
    assert scored(Lengths(-7.5), "so", squash="none")[0].value == -7.5
    assert "gave -7.5" in scored(Lengths(-7.5), "so")[0].explanation


def test_the_model_reads_the_question_without_the_policys_template_and_each_pair_once() -> None:
    scorer = Lengths()
    parts = scored(scorer, "x</think>so", "x</think>so", "never closed", extract="after_think", squash="none")
    assert scorer.asked == [("Why?", "so"), ("Why?", "")]
    assert [part.value for part in parts] == [2.0, 2.0, 0.0]


def test_a_score_that_is_no_number_abstains() -> None:
    assert [scored(Lengths(bad), "so")[0].value for bad in (math.nan, math.inf)] == [None, None]


def test_the_sigmoid_does_not_overflow() -> None:
    assert (sigmoid(-1e4), sigmoid(1e4), sigmoid(0)) == (0.0, 1.0, 0.5)


def test_a_column_is_the_question_only_where_the_policy_read_it() -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert question_of(prompt("[user] Why? [model]", messages=turns)) == "Why?"
    assert question_of(prompt("[user] Why? [model]", question="How?")) == "[user] Why? [model]"


# ---------------------------------------------------------------- how sure they are
def test_the_spread_of_learned_parts_is_that_within_a_completion() -> None:
    rows = [(0.2, 0.6, 1.0), (0.5, None, 0.0)]
    rollouts = [
        Rollout(completion("x"), [RewardPart(n, v, 1.0) for n, v in zip("abc", values, strict=True)], None)
        for values in rows
    ]
    groups = [Group("1-0", prompt(), rollouts)]
    assert learned_spread(groups, ["a", "b"]) == {"reward/learned_spread": pytest.approx(0.2)}
    assert learned_spread(groups, ["a"]) == {}
    assert learned_names([RewardModelReward(model="m"), AccuracyReward(), RewardModelReward(model="n")]) == [
        "reward_model", "reward_model_2"
    ]  # fmt: skip


# ---------------------------------------------------------------- before and around a run
@pytest.mark.parametrize(("kind", "refused"), [("LlamaForCausalLM", True), ("LlamaForSequenceClassification", False)])
def test_a_language_model_is_refused_as_reward_model_before_it_trains_anything(
    kind: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    rewards = [{"kind": "reward_model", "model": str(tmp_path)}]
    stage, report = RLStage.model_validate({"data": {"source": "addition"}, "rewards": rewards}), Report()
    check_models(stage, 1, report)
    assert [problem.field for problem in report.problems] == ["stages.1.rewards.0.model"] * refused


def test_a_judge_knows_the_answers_of_all_attempts_of_its_run(tmp_path: Path) -> None:
    attempts = [tmp_path / "attempts" / number for number in "123"]
    for folder in [*attempts[:2], tmp_path / "other"]:
        (folder / "judge").mkdir(parents=True)
    attempts[2].mkdir()
    resume = tmp_path / "other" / "checkpoints" / "0-rl-000002"
    found = earlier_answers(cast(Any, SimpleNamespace(folder=attempts[2], resume=resume)))
    assert [folder.parent.name for folder in found] == ["other", "1", "2"]
    assert earlier_answers(cast(Any, SimpleNamespace(folder=tmp_path / "run", resume=None))) == []


def test_a_judge_is_built_without_torch_and_writes_where_its_stage_and_config_are_named(tmp_path: Path) -> None:
    config = JudgeReward(base_url="http://127.0.0.1:1/v1", model="m", rubric="r")
    built = LearnedRewards(stage="1-rl", folder=tmp_path / "judge", rank=2)(config)
    assert isinstance(built, Judge)
    built.close()
    [path] = (tmp_path / "judge").iterdir()
    assert re.fullmatch(r"1-rl-[0-9a-f]{8}-rank2\.jsonl", path.name)


def test_preference_accuracy_counts_ties_half_and_what_is_no_number_as_lost() -> None:
    figures = preference_accuracy(Lengths(), [("q", "long", "no"), ("q", "a", "b"), ("q", "a", "long" * 20)])
    assert figures["accuracy"] == 0.5
    assert (figures["num_pairs"], figures["num_ties"], figures["num_cut"]) == (3, 1, 1)
    assert preference_accuracy(Lengths(math.nan), [("q", "a", "b")])["accuracy"] == 0.0


def test_pairs_are_texts_or_conversations(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}\n')
    assert pairs_of(path) == [("q", "a", "b")]
