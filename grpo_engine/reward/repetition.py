"""Repetition: 1 without repeated n-grams, falling with their share and with loops."""

from __future__ import annotations

import re
from typing import NamedTuple

from grpo_engine.config_rewards import RepetitionReward
from grpo_engine.reward import prose, scripts
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import capped
from grpo_engine.reward.scripts import TextPattern
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

# A character of a script without blanks, a word or number, or a run of mathematical signs; a ruler is one such run, and
# other punctuation (the asterisk included, for it marks bold text) is skipped.
_UNIT = TextPattern("{letters_digits}+", "{unspaced}", "[-+/=<>^%]+")
# The same in ASCII text: what is none of them as a blank, and the runs of signs, which stand apart from words.
_SPACED = bytes(code if chr(code).isalnum() or chr(code) in "-+/=<>^%" else ord(" ") for code in range(256))
_SIGN_RUN = re.compile("([-+/=<>^%][-+/=<>^%]*)")
# Longer unbroken runs are taken apart into characters, or a loop without blanks would be one word.
_MAX_WORD = 40
# One sign again and again, as models that came apart write: "!!!!!!". Rulers of tables are shorter.
_SIGNS = re.compile(r"([^\w\s])\1{99,}")
MIN_UNITS = 10
"""Below this many words the metric abstains."""
LOOP_ROUNDS, LOOP_UNITS = 4, 20
"""A loop is the same stretch at least 4 times in a row, 20 words or more in all."""


class Repeats(NamedTuple):
    """What is repeated in a sequence of units."""

    share: float
    """Of the units, those inside an n-gram that stood before."""
    loop: tuple[int, int] | None
    """First and last + 1 unit of the longest loop."""
    period: int
    """Units of the loop's stretch."""
    endless: bool
    """Whether the sequence ends in a loop."""


def metric(config: RepetitionReward) -> Metric:
    """1 - (share - free_share) / (1 - free_share) for the share of words inside n-grams that stood before.

    A loop halves it; one that the completion ends in makes it 0: the sampler would have gone on for ever. In scripts
    without blanks two characters stand for a word. Letter case, white space and punctuation do not matter.
    """

    def judge(_: Prompt, completion: Completion) -> Judgement:
        return _judge(config, completion.text)

    own = module_source(__file__, prose.__file__, scripts.__file__)
    return Metric(config.kind, config.weight, version_of(config.kind, own), judge)


def _judge(config: RepetitionReward, whole: str) -> Judgement:
    text, note = capped(whole)
    span = (0, len(text))
    signs = _SIGNS.search(text) if _may_have_run(text) else None
    if signs is not None:
        shown = f"{signs[1]!r} stands {signs.end() - signs.start()} times in a row.{note}"
        return Judgement(0.0, shown, signs.span())
    units = split_units(text)
    if len(units) < MIN_UNITS:
        return Judgement(None, f"Only {len(units)} words: too few to judge.", span)
    found = find_repeats(units, _window(units, config.ngram))
    value = 1.0 - max(0.0, found.share - config.free_share) / (1.0 - config.free_share)
    said = f"{found.share:.0%} of {len(units)} words stand in repeated n-grams, {config.free_share:.0%} are free."
    if found.loop is not None:
        value = 0.0 if found.endless else value / 2
        said += _describe_loop(units, found.loop, found)
    return Judgement(value, said + note, span)


def _may_have_run(text: str) -> bool:
    """False where no character stands 100 times in a row: such a run fills one of the stretches that are looked at."""
    looked_at = zip(text[::50], text[20::50], text[49::50], strict=False)
    return any(first == middle == last for first, middle, last in looked_at)


def split_units(text: str) -> list[str]:
    """Words in small letters; every character by itself in scripts without blanks and in very long runs."""
    text = text.casefold()
    if text.isascii():
        units = " ".join(_SIGN_RUN.split(text.encode().translate(_SPACED).decode())).split()
    else:
        units = _UNIT.findall(text)
    if max(map(len, units), default=0) <= _MAX_WORD:
        return units
    return [part for unit in units for part in (unit if len(unit) > _MAX_WORD and unit.isalnum() else (unit,))]


def _window(units: list[str], ngram: int) -> int:
    """Units of an n-gram: twice as many where most units are characters, two of which stand for a word."""
    letters = len("".join(units))
    return ngram * 2 if letters < 1.5 * len(units) and sum(map(str.isalpha, units)) > len(units) / 2 else ngram


def find_repeats(units: list[str], n: int) -> Repeats:
    """One pass: each n-gram is looked up where it stood last. A run of n-grams at the same distance is a loop with that
    period, which is how periods of any length are found in linear time."""
    first_places: dict[tuple[str, ...], int] = {}
    grams = zip(*(units[shift:] for shift in range(n)), strict=False)
    firsts = list(map(first_places.setdefault, grams, range(len(units))))
    last = firsts.copy()  # at a gram's first place: where it stood last
    covered = end = distance = began = following = 0
    best, looping = (0, 0, 0), False
    for start, first in [(start, first) for start, first in enumerate(firsts) if first != start]:
        before, last[first] = last[first], start
        covered += start + n - max(end, start)
        end = start + n
        if start - before != distance or start != following:
            distance, began = start - before, before
        following = start + 1
        length = end - began
        looping = length >= max(LOOP_ROUNDS * distance, LOOP_UNITS)
        if looping and length > best[0]:
            best = (length, began, distance)
    length, began, period = best
    loop = (began, began + length) if length else None
    return Repeats(covered / max(1, len(units)), loop, period, looping and following == len(firsts))


def _describe_loop(units: list[str], loop: tuple[int, int], found: Repeats) -> str:
    first, last = loop
    stretch = " ".join(units[first : first + found.period])[:80]
    ending = ", and the completion ends in a loop" if found.endless else ""
    return f" A loop repeats “{stretch}” {(last - first) // found.period} times{ending}."
