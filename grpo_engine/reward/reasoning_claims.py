"""A claim and its contrary in one solution: "17 is prime" and "17 is not prime", "n is even" and "n is odd".

Only properties of a fixed list are read. Sentences that suppose, ask or quote are left out, and so are corrections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_engine.reward.reasoning_folding import fold, matches_from

# Patterns in small letters are held against folded text.
_PREDICATES = (
    r"even|odd|prime|composite|positive|negative|rational|irrational|divisible by [0-9]{1,9}|a multiple of [0-9]{1,9}|"
    r"a factor of [0-9]{1,9}|a divisor of [0-9]{1,9}|a perfect square|a square|a perfect cube|a palindrome|a leap year|"
    r"a right triangle|isosceles|equilateral|parallel|perpendicular|congruent|similar|continuous|differentiable|"
    r"convergent|divergent|invertible|injective|surjective|true|false|possible|impossible|valid|invalid|correct|"
    r"incorrect|a solution|a root|an integer|whole|real|zero|symmetric|linear|independent|dependent|bounded|finite|"
    r"infinite"
)
_CLAIM = re.compile(
    r"\b(?:is|are)(?P<negated>n't| not| never)? (?:also |indeed |therefore |thus |clearly |then )?(?:an? )??"
    r"(?P<predicate>" + _PREDICATES + r")(?![\w-])"
)
_CLAIMS = ("is ", "isn't ", "are ", "aren't ")
_SUBJECT_CHARACTERS = 80
_SENTENCE_CHARACTERS = 300
_OPPOSITES = {
    "odd": ("even", False), "composite": ("prime", False), "negative": ("positive", False), "false": ("true", False),
    "irrational": ("rational", False), "divergent": ("convergent", False), "impossible": ("possible", False),
    "invalid": ("valid", False), "incorrect": ("correct", False), "dependent": ("independent", False),
    "infinite": ("finite", False),
}  # fmt: skip
_HEDGED = re.compile(
    r"\b(?:if|whether|suppose|assume|assuming|unless|or|maybe|might|could|would|says|claims?|either|neither|case|"
    r"contradiction|contrary|when|hypothesis|let|every|each|any|all|some|no)\b|\?"
)
_CORRECTED = re.compile(r"\b(?:wait|actually|mistake|oops|correction|instead|hmm|now|became|becomes|changed|but)\b")
_LEAD = re.compile(
    r"^.*\b(?:that|so|thus|therefore|hence|and|then|but|since|because|as|also|however|now|conclude)\b|^ ?(?:the|this) ",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two places that cannot both hold; [start, end) is the second."""

    why: str
    start: int
    end: int


def contrary_claims(text: str) -> tuple[int, Conflict | None]:
    """How many claims are made again, and the first whose contrary is claimed as well."""
    made: dict[tuple[str, str], tuple[bool, int]] = {}
    again = 0
    folded = fold(text)
    for match in matches_from(_CLAIM, _CLAIMS, folded):
        claim = _claim(text, folded, match)
        if claim is None:
            continue
        subject, predicate, holds, start = claim
        held, place = made.setdefault((subject, predicate), (holds, match.end()))
        if place == match.end():
            continue
        again += 1
        if held != holds and not _CORRECTED.search(folded, place, match.end()):
            why = f"“{text[start : match.end()]}” contradicts what was said of {subject} before."
            return again, Conflict(why, start, match.end())
        made[subject, predicate] = (holds, match.end())
    return again, None


def _claim(text: str, folded: str, match: re.Match[str]) -> tuple[str, str, bool, int] | None:
    """Subject, property, whether it is claimed or denied, and where; None where the sentence does not claim it."""
    nearest = max(0, match.start() - _SENTENCE_CHARACTERS)
    line = max(text.rfind(sign, nearest, match.start()) for sign in ".\n;!?,:") + 1
    if _HEDGED.search(folded, max(line, nearest), match.end()) or "?" in text[match.end() : match.end() + 40]:
        return None
    subject = text[max(line, match.start() - _SUBJECT_CHARACTERS) : match.start()].strip(" $")
    while (lead := _LEAD.match(fold(subject))) is not None:
        subject = subject[lead.end() :].strip(" $")
    if not 0 < len(subject.split()) <= 4:
        return None
    said = text[slice(*match.span("predicate"))].lower()
    predicate, holds = _OPPOSITES.get(said, (said, True))
    return subject.lower(), predicate, holds != bool(match["negated"]), match.start() - len(subject) - 1
