"""What a solution concludes, and whether its final answer is that.

The final answer stands behind ####, in the last \\boxed{} or behind the last "answer is", or is all of a short answer.
Numbers are compared as written, without separators and idle zeros; the choices A to J as letters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_engine.reward.reasoning_folding import fold, matches_from, words_pattern
from grpo_engine.reward.reasoning_quantities import agree, agrees_with_any, numbers_of, quantity, stands_in_words

# Patterns in small letters are held against folded text.
_MARKS = ("####", "\\boxed", "answer", "antwort", "réponse", "respuesta", "ответ", "答")
_MARK = re.compile(
    r"(?:\#{4}|\\boxed[ \t]{0,4}\{|\banswer(?: to [^.\n]{0,40})?(?: is(?: therefore| thus)?|:| =)\**:?|"
    r"\b(?:antwort(?: ist| lautet|:)|réponse(?: est| ?:)|respuesta(?: es|:))|ответ(?::| —)|"
    r"答案?(?:是|为|：|:))[ \t]{0,4}"
)
# The last sentence of a solution without a mark, where it draws the conclusion.
_CONCLUDING = re.compile(
    r"(?:^|[.!?]\s+|\n\s*)(?:so|thus|therefore|hence|altogether|in total|finally|in all|overall)\b"
    r"(?P<said>[^\n]{1,200})\s*$"
)
_BOLD = re.compile(r"\*\*([^*\n]{1,60})\*\*[^*\n]{0,60}\s*$")
_TAIL = 300
_VALUE = re.compile(
    r"(?:[*_`$\s({]|\\(?:boxed|text|mathrm|mathbf|textbf)\{|\\[(\[]|x\s?="
    r"|about |approximately |option |choice |the ){0,12}"
    r"(?P<value>[-−]?[$€£]?(?:\\?d?frac\{-?[0-9]{1,12}\}\{[0-9]{1,12}\}|\.?[0-9][0-9,.]*(?:/[0-9]+)?)|[A-J](?![\w']))"
    r"(?P<after>\s*\\?%)?"
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|mistake|wrong|incorrect|not right|recheck|re-check|reconsider|correction|oops|hmm|instead|"
    r"let me (?:re|check)|if|suppose|assume|would|could|might|maybe|whether|guess|someone|naive)\b|\?"
)
_SHORT_ANSWER = 80
_MIN_NUMBERS = 3
_MAX_NUMBERS = 2000
_PROOF = re.compile(f"=|≈|{words_pattern(['equals', 'is'])}")


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A stated result: its text in one spelling, and its place."""

    value: str
    start: int
    end: int


def stated(text: str, start: int = 0, end: int | None = None) -> list[Conclusion]:
    """What is stated as the answer in text[start:end], in order."""
    found: list[Conclusion] = []
    last = len(text) if end is None else end
    for mark in matches_from(_MARK, _MARKS, fold(text), start, last):
        value = _VALUE.match(text, mark.end(), last)
        if value is not None:
            found.append(Conclusion(quantity(value["value"] + (value["after"] or "")), mark.start(), value.end()))
    return found


def final_answer(text: str, span: tuple[int, int]) -> Conclusion | None:
    """What the answer text[span] comes to; None where that is no single number or choice."""
    found = stated(text, *span)
    if found:
        return found[-1]
    begin = max(span[0], span[1] - _TAIL)
    tail = text[begin : span[1]]
    bold = _BOLD.search(tail)
    if bold is not None:
        return _single(bold[1], begin + bold.start(1), begin + bold.end(1))
    if span[1] - span[0] <= _SHORT_ANSWER and "\n" not in tail:
        return _single(tail, *span)
    concluding = [match for match in _CONCLUDING.finditer(fold(tail)) if ". " not in match["said"].rstrip(". ")]
    if not concluding:
        return None
    return _single(tail[slice(*concluding[-1].span("said"))], begin + concluding[-1].start("said"), span[1])


def _single(answer: str, start: int, end: int) -> Conclusion | None:
    """The one number or choice of a short text."""
    numbers = numbers_of(answer)
    if len(numbers) == 1 and not re.search(r"[=+*/^√\\]", answer):
        return Conclusion(numbers.pop() + ("%" if "%" in answer else ""), start, end)
    choice = re.fullmatch(r"\(?([A-J])[).]?", answer.strip())
    return Conclusion(choice[1], start, end) if choice else None


def disagreement(text: str, span: tuple[int, int]) -> tuple[bool, str, tuple[int, int]] | None:
    """Whether the final answer in text[span] is at odds with the text before it: (at odds, why, where).

    None where nothing can be compared. At odds is an answer other than the last one stated, unless that was taken back,
    and a number that the reasoning nowhere comes to.
    """
    final = final_answer(text, span)
    if final is None:
        return None
    before = stated(text, 0, final.start)
    where = (final.start, final.end)
    if before:
        last = before[-1]
        if agree(last.value, final.value):
            return False, f"The final answer {final.value} is what the reasoning states.", where
        folded = fold(text)
        if _TAKEN_BACK.search(folded, last.end, final.start) or _TAKEN_BACK.search(
            folded, max(0, last.start - 60), last.start
        ):
            return None
        return True, f"The reasoning states {last.value}, but the final answer is {final.value}.", where
    return _unreached(text, final)


def _unreached(text: str, final: Conclusion) -> tuple[bool, str, tuple[int, int]] | None:
    """Whether the reasoning comes to the number at all."""
    reasoning = text[: final.start]
    if not _PROOF.search(reasoning) or final.value in "ABCDEFGHIJ":
        return None
    where = (final.start, final.end)
    numbers = numbers_of(reasoning)
    if len(numbers) > _MAX_NUMBERS:
        return None
    if agrees_with_any(final.value, numbers) or _stands_in_words(reasoning, final.value):
        return False, f"The reasoning comes to the final answer {final.value}.", where
    if len(numbers) < _MIN_NUMBERS:
        return None
    return True, f"The reasoning nowhere comes to the final answer {final.value}.", where


def _stands_in_words(text: str, value: str) -> bool:
    """Whether the number, or the half that it ends with, stands in words."""
    return stands_in_words(text, value.strip("-%")) or (value.endswith(".5") and stands_in_words(text, "0.5"))
