"""The claim `cheap_metrics`: completions a second through all metrics but accuracy, code execution and step validity.

Completions of 200 words, which are 200 tokens or more: worked solutions, proofs, markdown, code, mixed language and a
loop, each made different by its numbers. Two processes, one a core, as two engine ranks would score.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

from benchmarks import results
from benchmarks.results import Row, Spread
from grpo_engine.config_rewards import (
    CodeQualityReward,
    FormatReward,
    InformationDensityReward,
    InstructionFollowingReward,
    LanguageConsistencyReward,
    LengthReward,
    LogicalConsistencyReward,
    ReadabilityReward,
    RepetitionReward,
)
from grpo_engine.types import Completion, Prompt

CONFIGS = (
    FormatReward(), LengthReward(max_tokens=1024, buffer_tokens=256), LanguageConsistencyReward(), ReadabilityReward(),
    InformationDensityReward(), RepetitionReward(), InstructionFollowingReward(), CodeQualityReward(),
    LogicalConsistencyReward(),
)  # fmt: skip
NUM_TOKENS = 200
GOAL = 2_000.0
PROCESSES = 2
DURATION_S = 5.0
_BATCH = 256
_CONSTRAINTS = [
    {"kind": "word_count", "at_most": 300}, {"kind": "keywords", "words": ["total", "answer"]},
    {"kind": "forbidden_words", "words": ["obviously", "clearly"]}, {"kind": "bullet_count", "at_most": 5},
]  # fmt: skip
_SENTENCES = (
    "First we find the total of the {0} apples and {1} pears.", "Each box holds {1}, so {0} / {1} boxes are full.",
    "We multiply both sides by {0} and subtract {1}.", "Since {0} exceeds {1}, the difference is positive.",
    "Wait, let me check this step again.", "The perimeter is 2 * ({0} + {1}), which we need later.",
    "Therefore $x = \\frac{{{0}}}{{{1}}}$ holds for every case.", "Alternatively, one could factor n^2 - {0}n + {1}.",
    "This leaves {1} dollars for the third day.", "Hence the train arrives {0} minutes after the bus.",
    "The second number must be even because {0} divides it.", "Adding the fee of {1} gives a month's cost.",
)  # fmt: skip
_CODE = (
    "```python\ndef total_{0}(values, limit={1}):\n    result = 0\n    for value in values:\n"
    "        if value > limit:\n            result += value - {0}\n        else:\n            result -= 1\n"
    "    return result\n\n\ndef main():\n    print(total_{0}([{0}, {1}, 7]))\n\n\nmain()\n```\n"
)


def texts(count: int, seed: int = 0) -> list[str]:
    """Completions of about 200 tokens: of ten, one with code, one with a loop, one partly Chinese, one with a table."""
    chance = random.Random(seed)
    return [_text(chance, number % 10) for number in range(count)]


def _text(chance: random.Random, form: int) -> str:
    def fill(sentence: str) -> str:
        return sentence.format(chance.randrange(2, 999), chance.randrange(2, 99))

    words: list[str] = []
    code = f"\n{_CODE.format(chance.randrange(99), chance.randrange(99))}" if form == 0 else ""
    if form == 1:
        words += ["So the sum is twelve."] * 12
    if form == 2:
        words.append("然后我们把每箱的苹果数乘以箱子的数量，得到六十个苹果。")
    if form == 3:
        words.append("\n\n## Cost\n\n| item | cost |\n|---|---|\n| apples | 14 |\n| pears | 20 |\n\n")
    # A token of a model with a large vocabulary is a word, a number's part or a sign: words alone are fewer.
    while len(" ".join([*words, code]).split()) < NUM_TOKENS * 3 // 4:
        words.append(fill(chance.choice(_SENTENCES)) + ("\n\n" if chance.random() < 0.2 else ""))
    return f"<think>{' '.join(words)}</think>The answer is {chance.randrange(999)}.{code}"


def score_batches(args: tuple[int, float]) -> tuple[int, float]:
    """(completions, seconds) of one process that scores distinct batches for so many seconds."""
    seed, duration_s = args
    metrics = [import_module(f"grpo_engine.reward.{config.kind}").metric(config) for config in CONFIGS]
    prompt = Prompt("p", 0, "Question", [1], {"constraints": _CONSTRAINTS})
    num_batches = max(2, int(duration_s * GOAL / _BATCH))
    batches = [
        [Completion([1] * NUM_TOKENS, text, "stop", [], []) for text in texts(_BATCH, seed * 1_000 + number)]
        for number in range(num_batches)
    ]
    _score(metrics, prompt, batches[0])
    done, began = 0, time.perf_counter()
    for batch in batches[1:]:
        _score(metrics, prompt, batch)
        done += len(batch)
        if time.perf_counter() - began > duration_s:
            break
    return done, time.perf_counter() - began


def _score(metrics: Sequence[object], prompt: Prompt, batch: Sequence[Completion]) -> None:
    prompts = [prompt] * len(batch)
    for metric in metrics:
        metric.score(prompts, batch)  # type: ignore[attr-defined]


def cheap_metrics(rounds: int = 5) -> list[Row]:
    """The row of the claim; about ten seconds a round."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        rates = [_round(pool, number) for number in range(rounds)]
    kinds = ", ".join(config.kind for config in CONFIGS)
    row = Row(
        "cheap_metrics",
        Spread(rates).median,
        None,
        "completions/s",
        f"Python on {PROCESSES} cores: {PROCESSES} processes, one thread each; {len(CONFIGS)} metrics: {kinds}",
        GOAL,
        spread={"ours": rates},
        notes=f"{NUM_TOKENS} tokens each; of ten one has code, one a loop, one some Chinese, one a table.",
    )
    return [row]


def _round(pool: ProcessPoolExecutor, number: int) -> float:
    jobs = [(number * PROCESSES + rank, DURATION_S) for rank in range(PROCESSES)]
    return sum(done / seconds for done, seconds in pool.map(score_batches, jobs))


if __name__ == "__main__":
    results.show(cheap_metrics())
