"""The corpus of correct worked solutions, one corrupted step in each, and what the two reasoning metrics make of both.

`python -m tests.worked_solutions [seed …]` prints precision, recall and abstention. The corruption is drawn by seed: a
sentence with a number, then one of its numbers (one digit is changed) or operators (one is swapped), wherever it
stands: result, operand, final answer or prose. A calculator mark changes with the number it belongs to, as a model
would write it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from grpo_engine.reward import logical_consistency, step_validity

CORPUS = Path(__file__).parent / "data" / "rewards" / "worked_solutions.jsonl"
_NUMBER = re.compile(r"(?<![\w.,<])[0-9][0-9,]*(?:\.[0-9]+)?(?![\w,]|\.[0-9])|(?<=>>)[0-9][0-9,]*(?:\.[0-9]+)?")
_MARK = re.compile(r"<<[^<>\n]*>>")
_LIST = re.compile(r"^\s*(?:[0-9]+[.)]|\*{0,2}Step [0-9]+)", re.MULTILINE)
_SENTENCE = re.compile(r"[^\n]+?(?:[.!?](?=\s)|(?=\n)|$)")
_OPERATORS = {
    "+": "-",
    "-": "+",
    "−": "+",
    "–": "+",
    "*": "+",
    "×": "+",
    "/": "*",
    "÷": "×",
    r"\cdot": "+",
    r"\times": "+",
}
_OPERATOR = re.compile(r"(?<=[0-9)}] )(?:[+\-−–*×/÷]|\\cdot|\\times)(?= \$?[0-9({\\])")
_BESIDE = re.compile(r"(?:[-+*/×÷·^−–]|\\cdot|\\times)[\s$€£({]*$")


@dataclass(frozen=True)
class Solution:
    """A correct worked solution."""

    id: str
    source: str
    licence: str
    text: str


@dataclass(frozen=True)
class Corrupted:
    """The solution with one step made wrong."""

    text: str
    kind: str
    """result, operand, operator, answer or prose."""
    place: int


def load() -> list[Solution]:
    return [Solution(**json.loads(line)) for line in CORPUS.read_text().splitlines()]


def corrupt(solution: Solution, seed: int) -> Corrupted:
    """One step of the solution made wrong; the same seed gives the same corruption."""
    rng, text = Random(f"{seed}/{solution.id}"), solution.text
    hidden = [match.span() for match in (*_MARK.finditer(text), *_LIST.finditer(text))]
    numbers = [match for match in _NUMBER.finditer(text) if not _inside(match.start(), hidden)]
    sentences = [match.span() for match in _SENTENCE.finditer(text)]
    sentences = [span for span in sentences if any(span[0] <= match.start() < span[1] for match in numbers)]
    start, end = rng.choice(sentences)
    operators = [match for match in _OPERATOR.finditer(text, start, end) if not _inside(match.start(), hidden)]
    if operators and rng.random() < 0.2:
        operator = rng.choice(operators)
        swapped = text[: operator.start()] + _OPERATORS[operator.group()] + text[operator.end() :]
        return Corrupted(swapped, "operator", operator.start())
    number = rng.choice([match for match in numbers if start <= match.start() < end])
    return _with_other_number(text, number, rng)


def _with_other_number(text: str, number: re.Match[str], rng: Random) -> Corrupted:
    old, new = number.group(), _other(number.group(), rng)
    before, after = text[: number.start()], text[number.end() :]
    kind = _kind(before, after)
    plain_old, plain_new = old.replace(",", ""), new.replace(",", "")
    mark = _MARK.search(before[-80:])
    if kind == "result" and mark is not None and before.endswith(">>"):
        inner = before.rindex("=")
        before = before[:inner] + before[inner:].replace(plain_old, plain_new, 1)
    elif kind == "operand" and (following := _MARK.match(re.sub(r"^[^<\n]{0,60}", "", after))) is not None:
        at = after.index("<<")
        inside = re.sub(rf"(?<![0-9.]){re.escape(plain_old)}(?![0-9.])", plain_new, following.group(), count=1)
        after = after[:at] + inside + after[at + len(following.group()) :]
    return Corrupted(before + new + after, kind, number.start())


def _kind(before: str, after: str) -> str:
    line = before.rpartition("\n")[2]
    if re.search(r"####\s*$|\\boxed\{[^}]*$|[Aa]nswer[^.]*$", line):
        return "answer"
    if re.search(r"(?:[=≈]|>>)[\s$€£&]*$", before):
        return "result"
    operates = _BESIDE.search(before) or re.match(r"[\s)}]*(?:[-+*/×÷·^−–]|\\cdot|\\times)", after)
    return "operand" if operates else "prose"


def _other(number: str, rng: Random) -> str:
    """The number with one digit changed; the first digit of several does not become 0."""
    places = [place for place, sign in enumerate(number) if sign.isdigit()]
    place = rng.choice(places)
    lowest = 1 if place == 0 and len(places) > 1 else 0
    digit = rng.choice([str(other) for other in range(lowest, 10) if str(other) != number[place]])
    return number[:place] + digit + number[place + 1 :]


def _inside(place: int, spans: Iterable[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


# ---------------------------------------------------------------- what the metrics make of it
@dataclass(frozen=True)
class Verdict:
    """Of one text: None = abstained."""

    steps: float | None
    consistency: float | None

    @property
    def flagged(self) -> bool:
        return (self.steps is not None and self.steps < 1) or self.consistency == 0

    @property
    def abstained(self) -> bool:
        return self.steps is None and self.consistency is None


def verdict(text: str) -> Verdict:
    return Verdict(step_validity.judge_text(text).value, logical_consistency.judge_text(text).value)


@dataclass(frozen=True)
class Measured:
    """Over the corpus and its corruptions, both metrics together."""

    false_alarms: list[str]
    """Ids of correct solutions that were flagged."""
    found: Counter[str]
    """Corruptions that were flagged, by kind."""
    made: Counter[str]
    steps_abstained: int
    """Of the correct solutions."""
    consistency_abstained: int
    both_abstained: int
    num_solutions: int

    @property
    def precision(self) -> float:
        return self.found.total() / (self.found.total() + len(self.false_alarms))

    @property
    def recall(self) -> float:
        return self.found.total() / self.made.total()


def measure(seed: int) -> Measured:
    solutions = load()
    right = [verdict(solution.text) for solution in solutions]
    wrong = [corrupt(solution, seed) for solution in solutions]
    return Measured(
        [solution.id for solution, said in zip(solutions, right, strict=True) if said.flagged],
        Counter(made.kind for made in wrong if verdict(made.text).flagged),
        Counter(made.kind for made in wrong),
        sum(said.steps is None for said in right),
        sum(said.consistency is None for said in right),
        sum(said.abstained for said in right),
        len(solutions),
    )


def main(seeds: list[int]) -> None:
    for seed in seeds:
        got = measure(seed)
        print(f"seed {seed}: precision {got.precision:.4f}, recall {got.recall:.3f}, false alarms {got.false_alarms}")
        print("  recall by kind:", {kind: f"{got.found[kind]}/{made}" for kind, made in sorted(got.made.items())})
        print(f"  abstained of {got.num_solutions}: step validity {got.steps_abstained}, consistency "
              f"{got.consistency_abstained}, both {got.both_abstained}")  # fmt: skip


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0])
