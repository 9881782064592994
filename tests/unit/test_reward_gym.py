"""The gym reward: the scorer that reasoning-gym ships with a task, and what such scorers must not be given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_engine.config_rewards import GymReward
from grpo_engine.errors import RewardError
from grpo_engine.reward import gym
from grpo_engine.reward.metric import Judgement, Metric
from tests.reward_cases import completion, prompt

EVALUATES = re.compile(r"\b(?:eval|exec|sympify|parse_expr|__import__)\(|\bpickle\b|\bsubprocess\b")
HARMLESS = {
    "codeio": "runs its own programs when it makes items", "number_sorting": "evaluates the gold answer",
    "basic_arithmetic": "evaluates what it made itself", "bitwise_arithmetic": "evaluates its own problem",
    "propositional_logic": "parses with a parser of its own", "generators_00_49": "evaluates its own fractions",
    "generators_50_99": "evaluates its own fractions",
}  # fmt: skip
"""Files of the package that evaluate text, none of it an answer."""


def made(task: str) -> Metric:
    return gym.metric(GymReward(extract="whole"), task, {})


def judged(task: str, text: str, **columns: Any) -> Judgement:
    return made(task).judge(prompt("Q", **columns), completion(text))


def test_gym_scores_with_the_scorer_of_the_task() -> None:
    how = gym.metric(GymReward(), "chain_sum", {"min_terms": 2, "max_terms": 2})
    asked = prompt("What is 4 + 3?", question="4 + 3 =", answer="7", metadata={})
    right, wrong, cut = [how.judge(asked, completion(text)).value for text in ("<think>x</think>7", "8", "<think>")]
    assert (right, cut) == (1.0, 0.0)
    assert wrong is not None
    assert wrong < 0.1


@pytest.mark.parametrize(
    ("fails", "says"), [(lambda answer, entry: 1 / 0, "ZeroDivisionError"), (lambda answer, entry: 1.5, "gave 1.5"),
                        (lambda answer, entry: float("nan"), "gave nan")],
)  # fmt: skip
def test_a_scorer_that_fails_or_gives_no_share_abstains(fails: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "load_scorer", lambda task, options: fails)
    said = judged("chain_sum", "7", answer="7")
    assert said.value is None
    assert says in said.explanation


def test_an_unknown_gym_task_is_a_reward_error() -> None:
    prepare = made("no_such_task").prepare
    assert prepare is not None
    with pytest.raises(RewardError, match="no_such_task"):
        prepare()


def test_the_version_names_the_metric() -> None:
    assert re.fullmatch("gym@[0-9a-f]{8}", made("chain_sum").version)


# ---------------------------------------------------------------- answers that would be executed
COUNTDOWN = {"answer": "3 + 4", "metadata": {"numbers": [3, 4], "target": 7}}
WRITES = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize(
    ("task", "columns"),
    [("countdown", COUNTDOWN), ("polynomial_multiplication", {"answer": "x"}), ("string_insertion", {"answer": "AB"}),
     ("simple_integration", {"metadata": {"variable": "x", "integrand": "x"}}), ("spiral_matrix", {"answer": "1 2"}),
     ("n_queens", {"metadata": {"valid_answers": ["Q"]}}), ("binary_matrix", {"answer": "0"})],
)  # fmt: skip
def test_no_scorer_executes_an_answer(task: str, columns: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    said = judged(task, WRITES.format(path=str(mark)), **columns)
    assert said.value == 0.0
    assert "would execute it" in said.explanation
    assert not mark.exists()


def test_a_scorers_own_names_are_no_answer() -> None:
    assert judged("string_insertion", "oracle_answer", answer="AABCD").value == 0.0
    assert judged("string_insertion", "AABCD", answer="AABCD").value == 1.0
    assert judged("string_insertion", "['A', 'B']", answer="AB").value == 0.1


@pytest.mark.parametrize(("answer", "value"), [("3 + 4", 1.0), ("(4) + 3", 1.0), ("4 * 3", 0.05), ("4 +", 0.01)])
def test_formulas_are_scored_as_before(answer: str, value: float) -> None:
    assert judged("countdown", answer, **COUNTDOWN).value == value


FORMULAS = ["x**2/2 + C", "sqrt(2)*exp(-x) + log(x)", "2*x^3 - 1.5e3", "3!", "(1+2)*\n3", "sin(x)**2"]
NO_FORMULAS = [
    "exec(x)", "x.func", "x . func", "S('x')", "lambda x: x", "[1]", "x if x else y", "__x", "x; y", "ｅxec(1)", "a:=1",
    "eval(1)", "open(1)", "1" * 20_000, "print", "\\frac{1}{2}", "{1}", "@x", "a & b", "0 if 1 else 2",
]  # fmt: skip
LITERALS = ["[[1, 0], [0, 1]]", "['A', \"B\"]", "-1", "(1, 2)", "1 2 3", "_ Q\nQ _", "the answer", "", "\0", "1 +", "{"]
NO_LITERALS = ["oracle_answer", "f()", "a.b", "[x for x in y]", "'a' * 9", "[a]", "(yield)", "not x", "lambda: 0",
               "-" * 9_000 + "1", "[" + "1," * 9_000 + "]"]  # fmt: skip


@pytest.mark.parametrize("kind", ["formula", "literal"])
def test_what_can_be_evaluated_without_executing_anything(kind: Any) -> None:
    inert, active = (FORMULAS, NO_FORMULAS) if kind == "formula" else (LITERALS, NO_LITERALS)
    assert [text for text in inert if not gym.is_inert(text, kind)] == []
    assert [text for text in active if gym.is_inert(text, kind)] == []


def test_every_task_of_the_package_that_evaluates_text_is_known() -> None:
    root = Path(str(reasoning_gym.__file__)).parent
    found = {path.stem for path in root.rglob("*.py") if EVALUATES.search(path.read_text())}
    assert found == gym.EVALUATED.keys() | HARMLESS.keys()
    assert gym.EVALUATED.keys() <= DATASETS.keys()
