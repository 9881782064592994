"""How many answers a second answer accuracy compares: `python -m benchmarks.rewards_answers`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.results import Row, Spread, show
from grpo_engine.config_rewards import AccuracyReward
from grpo_engine.reward import accuracy
from grpo_engine.reward.pool import Pooled, RewardPool
from grpo_engine.types import Completion, Prompt

GOAL = 300.0
NUM_PROCESSES = 2
NUM_ANSWERS = 1_000
KINDS = ("integer",) * 6 + ("fraction",) * 3 + ("polynomial",)
"""60 % integers, 30 % fractions, 10 % polynomials."""

Pair = tuple[Prompt, Completion]


def math_answers(rounds: int = 3) -> list[Row]:
    """Unique answers, half of them right, through accuracy as a stage runs it: plain numbers in the engine's process,
    polynomials by math-verify in two scoring processes that are already warm."""
    config = AccuracyReward(extract="boxed")
    pool = RewardPool(NUM_PROCESSES)
    reward = Pooled(accuracy.metric(config), config, pool)
    try:
        _rate(reward, pairs(50, seed=0))  # starts the processes
        rates = Spread([_rate(reward, pairs(NUM_ANSWERS, seed=1 + number)) for number in range(rounds)])
    finally:
        pool.close()
    row = Row(
        "math_answers", rates.median, None, "answers/s",
        "math-verify alone parses and compares 44 to 70 polynomials/s on one core (research/embedded.md, section 6)",
        goal=GOAL, spread={"ours": rates.values},
        notes=f"{NUM_ANSWERS} unique answers (6 integers, 3 fractions, 1 polynomial in 10), {NUM_PROCESSES} processes",
    )  # fmt: skip
    return [row]


def _rate(reward: Pooled, answers: list[tuple[Pair, bool]]) -> float:
    """Answers a second; RuntimeError when a verdict is wrong."""
    prompts = [prompt for (prompt, _), _ in answers]
    completions = [completion for (_, completion), _ in answers]
    started = time.perf_counter()
    parts = reward.score(prompts, completions)
    seconds = time.perf_counter() - started
    wrong = [part.explanation for part, (_, right) in zip(parts, answers, strict=True) if part.value != float(right)]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} verdicts are wrong, first: {wrong[0]}")
    return len(answers) / seconds


def pairs(count: int, seed: int) -> list[tuple[Pair, bool]]:
    """Prompts with gold answers, completions, and whether each is right. No two golds are equal."""
    rng = random.Random(seed)
    make: dict[str, Callable[[random.Random, bool], tuple[str, str]]] = {
        "integer": _integer, "fraction": _fraction, "polynomial": _polynomial,
    }  # fmt: skip
    made: dict[str, tuple[Pair, bool]] = {}
    while len(made) < count:
        right = rng.random() < 0.5
        gold, answer = make[KINDS[len(made) % len(KINDS)]](rng, right)
        text = f"<think>I work it out step by step.</think>The answer is $\\boxed{{{answer}}}$."
        made[gold] = (Prompt(gold, 0, "Q", [], {"answer": gold}), Completion([], text, "stop", [], [])), right
    return list(made.values())


def _integer(rng: random.Random, right: bool) -> tuple[str, str]:
    gold = rng.randrange(10**9)
    return f"{gold}", f"{gold if right else gold + 1:,}"


def _fraction(rng: random.Random, right: bool) -> tuple[str, str]:
    top, bottom, factor = rng.randrange(1, 10**5), rng.randrange(2, 10**5), rng.randrange(2, 9)
    return f"{top}/{bottom}", f"\\frac{{{top * factor + (not right)}}}{{{bottom * factor}}}"


def _polynomial(rng: random.Random, right: bool) -> tuple[str, str]:
    """(ax + b)(cx + d), asked for expanded and answered as the product."""
    a, b, c, d = (rng.randrange(2, 40) for _ in range(4))
    gold = f"{a * c}x^2 + {a * d + b * c}x + {b * d + (not right)}"
    return gold, f"({a}x+{b})({c}x+{d})"


if __name__ == "__main__":
    show(math_answers())
