"""Information density: which share of the words says something that was not said before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from grpo_engine.config_rewards import InformationDensityReward
from grpo_engine.reward import density_words, phrases, prose, scripts
from grpo_engine.reward.density_words import EMPTY_WORDS, FILLERS, NO_CONTENT
from grpo_engine.reward.extraction import CLOSE_TAG, OPEN_TAG
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.phrases import Phrases
from grpo_engine.reward.prose import capped
from grpo_engine.reward.scripts import TextPattern
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MIN_WORDS = 5
"""Below this many words the metric abstains."""
_FILLERS = Phrases(FILLERS)
# Two characters of a script without blanks; else a word, or a term with its powers, indices and fractions.
_WORD = TextPattern("{letters_digits}+(?:[.^/_]{letters_digits}+)*", "{unspaced}{{1,2}}", NO_CONTENT)
_SENTENCE_END = re.compile(r"[.!?\n。！？](?:(?<=[\n。！？])|(?=\s))\s*")
# Of ASCII text, letters, digits and ends of lines as they are, a point for what joins or may itself be a word, a blank
# for anything else.
_SPACED = bytes(
    code if chr(code).isalnum() or chr(code) == "\n" else ord("." if chr(code) in ".^/_" + NO_CONTENT else " ")
    for code in range(256)
)
# A sentence of this many words of content, of which this share stood in one earlier sentence, only restates it.
_RESTATING_WORDS, _RESTATING_SHARE = 4, 0.8
# Sentences that are remembered for each word; bounds the time for words that stand everywhere.
_REMEMBERED = 8


def metric(config: InformationDensityReward) -> Metric:
    """New content divided by the number of words.

    A word of content counts 1 where it first appears, 1/2 where it comes back in new company (beside a word of content
    that it did not stand beside before), 0 otherwise. Function words, filler phrases ("it is important to note that",
    "let me think about this step by step") and sentences that restate an earlier one carry nothing; all are counted in
    the divisor. So padding and restating cost, and length that says something does not. Gibberish would count as new:
    use it beside a part that judges whether the answer is right.
    """

    def judge(_: Prompt, completion: Completion) -> Judgement:
        return _judge(completion.text)

    own = module_source(__file__, density_words.__file__, phrases.__file__, prose.__file__, scripts.__file__)
    return Metric(config.kind, config.weight, version_of(config.kind, own), judge)


def _judge(whole: str) -> Judgement:
    text, note = capped(whole)
    said = _Said()
    lowered, num_fillers = _without_fillers(text.lower().replace(OPEN_TAG, "\n").replace(CLOSE_TAG, "\n"))
    for words in _words_of_sentences(lowered):
        said.add(words)
    if said.num_words < MIN_WORDS:
        return Judgement(None, f"Only {said.num_words} words: too few to judge.", (0, len(text)))
    value = min(1.0, said.new / said.num_words)
    details = (
        f"{said.new:.0f} of {said.num_words} words carry new content; {said.num_restating} in sentences that restate "
        f"an earlier one, {num_fillers} filler phrases."
    )
    return Judgement(value, details + note, (0, len(text)))


def _words_of_sentences(text: str) -> Iterator[list[str]]:
    """What `_WORD` finds in each sentence; in ASCII most words are told by the blanks around them."""
    sentences = _SENTENCE_END.split(text)
    all_spaced = "\n".join(sentences).encode("ascii", "replace").translate(_SPACED).decode().split("\n")
    for sentence, spaced in zip(sentences, all_spaced, strict=True):
        yield spaced.split() if "." not in spaced and sentence.isascii() else _WORD.findall(sentence)


def _without_fillers(text: str) -> tuple[str, int]:
    """`text` with as many empty words as each filler phrase has words in its place, and the number of phrases."""
    found = _FILLERS.find(text)
    if not found:
        return text, 0
    kept, end = [], 0
    for start, stop in found:
        kept += [text[end:start], f"{NO_CONTENT} " * len(text[start:stop].split())]
        end = stop
    return "".join([*kept, text[end:]]), len(found)


class _Said:
    """What one text has said so far."""

    def __init__(self) -> None:
        self.num_words = 0
        self.new = 0.0
        self.num_restating = 0
        self._places: dict[str, list[int]] = {}  # word of content -> the sentences it stood in
        self._pairs: set[tuple[str, str]] = set()  # words of content that stood side by side
        self._num_sentences = 0

    def add(self, words: Sequence[str]) -> None:
        """One sentence. Its worth: first appearances, and half of those that come back beside another word than
        before."""
        all_places, pairs, here = self._places, self._pairs, self._num_sentences
        known: dict[str, list[int]] = {}  # words of earlier sentences, with their places
        num_first = num_beside = 0
        previous = ""
        for word in words:
            if word in EMPTY_WORDS:
                continue
            pair = (previous, word) if previous <= word else (word, previous)
            places = all_places.get(word)
            if places is None:
                all_places[word] = [here]
                num_first += 1
            else:
                if places[-1] != here:
                    known[word] = places
                if previous and pair not in pairs:
                    num_beside += 1
            pairs.add(pair)
            previous = word
        self.num_words += len(words)
        if self._restates(num_first + len(known), known.values()):
            self.num_restating += len(words)
        else:
            self.new += num_first + num_beside / 2
        self._remember(known.values())

    def _restates(self, num_distinct: int, known: Collection[list[int]]) -> bool:
        least = _RESTATING_SHARE * num_distinct
        if num_distinct < _RESTATING_WORDS or len(known) < least:
            return False
        return max(Counter(chain.from_iterable(known)).values()) >= least

    def _remember(self, known: Collection[list[int]]) -> None:
        for places in known:
            places.append(self._num_sentences)
            if len(places) > _REMEMBERED:
                del places[1]
        self._num_sentences += 1
