"""Accuracy: 1 when the extracted answer equals a gold answer (column `answer`, one or a list), else 0.

`compare: math` reads both as numbers, choices, sets, intervals, words (answers.py) and leaves formulas to math-verify
(answers_algebra.py); `number` compares decimals or text; `text` compares characters. A gold answer that cannot be read
is an error of the dataset: the part abstains, whatever the completion says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from importlib import import_module, metadata
from typing import Any, Literal

from grpo_engine.config_rewards import AccuracyReward
from grpo_engine.reward import (
    answers,
    answers_algebra,
    answers_numbers,
    answers_text,
    answers_units,
    extraction,
)
from grpo_engine.reward.answers import Algebra, Reading, Verdict, read
from grpo_engine.reward.extraction import Extraction
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MAX_ANSWER = 1_000
"""Characters of an answer that is read as mathematics; a longer one is compared as text only."""
GSM8K_MARK = "####"

_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,4})?"
    r"|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]{1,4})?"
)
_SHOWN_CHARACTERS = 80
_OWN_MODULES = (answers, answers_algebra, answers_numbers, answers_text, answers_units, extraction)


def metric(config: AccuracyReward) -> Metric:
    """Slow with `compare: math`: what only algebra decides goes to processes that can be killed."""
    is_math = config.compare == "math"
    return Metric(
        "accuracy",
        config.weight,
        _version(),
        partial(_judge, config),
        slow=is_math,
        quick=partial(_judge_quickly, config) if is_math else None,
        time_limit_s=config.time_limit_s,
        unjudged_value=0.0,
        prepare=partial(import_module, "math_verify") if is_math else None,
    )


def _version() -> str:
    sources = module_source(__file__, *(str(module.__file__) for module in _OWN_MODULES))
    libraries = [metadata.version(name) for name in ("math-verify", "sympy", "latex2sympy2-extended")]
    return version_of("accuracy", sources, " ".join(libraries).encode())


def _judge(config: AccuracyReward, prompt: Prompt, completion: Completion) -> Judgement:
    """For certain; may take long with `compare: math`."""
    said = _judge_with(config, prompt, completion, answers_algebra.compare_formulas)
    assert said is not None, "with algebra nothing stays open"
    return said


def _judge_quickly(config: AccuracyReward, prompt: Prompt, completion: Completion) -> Judgement | None:
    return _judge_with(config, prompt, completion, None)


def _judge_with(config: AccuracyReward, prompt: Prompt, completion: Completion, algebra: Any) -> Judgement | None:
    """None: `algebra` is needed and was not given."""
    golds = gold_texts(prompt.columns.get("answer"))
    if not golds:
        return Judgement(None, "The prompt has no gold answer, so nothing can be compared.")
    opened = extraction.opens_thinking(prompt.text)
    found = extraction.extract(config.extract, completion.text, thinking_opened=opened, tag=config.tag)
    if config.compare == "math" and config.extract not in ("boxed", "last_number"):
        found = extraction.stated(found)
    if found.text is None:
        return Judgement(0.0, f"{found.reason}, so there is no answer.")
    verdict = _compare(config, found.text, golds, prompt.text, algebra)
    if verdict.equal is None and algebra is None and not verdict.reason:
        return None
    return _judgement(found, golds, verdict)


def _judgement(found: Extraction, golds: Sequence[str], verdict: Verdict) -> Judgement:
    assert found.text is not None
    if verdict.equal is None:
        reason = verdict.reason or f"The gold answer {shorten(golds[0])} cannot be read as mathematics."
        return Judgement(None, f"{reason} That is an error of the dataset.", found.span)
    sign = "equals" if verdict.equal else "differs from"
    which = f"the gold answer {shorten(golds[0])}" if len(golds) == 1 else f"one of {len(golds)} gold answers"
    if len(golds) > 1 and not verdict.equal:
        which = f"all {len(golds)} gold answers"
    reason = f" {verdict.reason}" if verdict.reason else ""
    return Judgement(float(verdict.equal), f"{shorten(found.text)} {sign} {which}.{reason}", found.span)


# ---------------------------------------------------------------- comparing with several gold answers
def _compare(config: AccuracyReward, answer: str, golds: Sequence[str], question: str, algebra: Any) -> Verdict:
    if answer in golds:
        return Verdict(True)
    if config.compare == "text":
        return Verdict(False)
    if config.compare == "number":
        return Verdict(any(answers_equal(answer, gold, config.tolerance) for gold in golds))
    if len(answer) > MAX_ANSWER:
        return Verdict(False, f"It is longer than {MAX_ANSWER:,} characters, so it is compared as text only.")
    if strange := answers_text.strange_character(answer):
        return Verdict(False, f"{strange}.")
    reading = read(answer)
    asked: Algebra | None = algebra and partial(algebra, question=question, tolerance=config.tolerance)
    verdicts = [_against(reading, gold, config.tolerance, asked) for gold in golds]
    return next((verdict for wanted in (True, None) for verdict in verdicts if verdict.equal is wanted), verdicts[0])


def _against(answer: Reading, gold: str, tolerance: float, algebra: Algebra | None) -> Verdict:
    reading = _read_gold(gold)
    verdict = answers.compare(answer, reading, tolerance)
    if not verdict.equal and (problem := _fault(reading)):  # before algebra sees it
        return Verdict(None, f"The gold answer {shorten(gold)} cannot be compared: {problem}.")
    return answers.compare(answer, reading, tolerance, algebra) if verdict.equal is None and algebra else verdict


def _read_gold(gold: str) -> Reading:
    return read(extraction.extract("boxed", gold).text or gold if r"\boxed" in gold else gold)


def _fault(gold: Reading) -> str:
    """Why a gold answer can equal nothing but its own text, without full stop; empty when it can. Without algebra."""
    if len(gold.text) > MAX_ANSWER:
        return f"it is longer than {MAX_ANSWER:,} characters"
    parts = [read(value) for value in gold.values] if gold.brackets else [gold]
    faults = [answers_algebra.fault_of(part.text) for part in parts if part.is_formula]
    return next((fault[0].lower() + fault[1:] for fault in faults if fault), "")


def gold_problem(gold: Any, compare: Literal["math", "number", "text"] = "math") -> str | None:
    """Why the column `answer` with this value is an error of the dataset, as a sentence; None when it is none.

    Formulas are parsed by math-verify here and now, without a time limit; those that explode are refused before."""
    golds = gold_texts(gold)
    if not golds:
        return "There is no gold answer; it must be text or a finite number, or a list of them."
    problems = [_problem(text) for text in golds] if compare == "math" else []
    return next((problem for problem in problems if problem), None)


def _problem(gold: str) -> str | None:
    reading = _read_gold(gold)
    fault = _fault(reading)
    for part in [read(value) for value in reading.values] if reading.brackets else [reading]:
        if not fault and part.is_formula and answers_algebra.parse(part.text) is None:
            fault = f"{shorten(part.text)} cannot be read as mathematics"
    return f"The gold answer {shorten(gold)} cannot be compared: {fault}." if fault else None


# ---------------------------------------------------------------- gold answers
def gold_texts(answer: Any) -> list[str]:
    """The gold answers as text: one, or those of a list; empty when there is none. Of GSM8K's worked solutions only
    what follows #### counts."""
    items = answer if isinstance(answer, list | tuple) else [answer]
    texts = [_gold(item) for item in items]
    return [text for text in texts if text]


def gold_text(answer: Any) -> str | None:
    """The first of `gold_texts`, None when there is none."""
    return next(iter(gold_texts(answer)), None)


def _gold(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        return ""
    if isinstance(item, float) and not math.isfinite(item):
        return ""
    return str(item).rsplit(GSM8K_MARK, 1)[-1].strip()


# ---------------------------------------------------------------- numbers and text
def answers_equal(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Equal text after stripping, or equal numbers.

    Numbers are integers and decimals, compared exactly or within the relative difference `tolerance` of the gold:
    632 = 632.0 = +632 = 0632, and 1,234 = 1234. Case, units, fractions and formulas count as text.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return True
    number, wanted = _as_number(answer), _as_number(gold)
    if number is None or wanted is None:
        return False
    return number == wanted or (tolerance > 0 and abs(number - wanted) <= Decimal(str(tolerance)) * abs(wanted))


def _as_number(text: str) -> Decimal | None:
    text = text.replace("\u2212", "-")
    return Decimal(text.replace(",", "")) if len(text) <= extraction.MAX_NUMBER and _NUMBER.fullmatch(text) else None


def shorten(text: str) -> str:
    """Text for a sentence: one line, at most 80 characters, nothing invisible."""
    line = " ".join(text[: 4 * _SHOWN_CHARACTERS].split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
