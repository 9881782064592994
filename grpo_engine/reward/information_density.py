"""Information density: which share of the words says something that was not said before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from grpo_engine.config_rewards import InformationDensityReward
from grpo_engine.reward import density_words, phrases, prose, scripts
from grpo_engine.reward.density_words import EMPTY_WORDS, FILLERS, NO_CONTENT
from grpo_engine.reward.extraction import CLOSE_TAG, OPEN_TAG
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.phrases import find_phrases
from grpo_engine.reward.prose import capped
from grpo_engine.reward.scripts import TextPattern
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MIN_WORDS = 5
"""Below this many words the metric abstains."""
# Two characters of a script without blanks; else a word, or a term with its powers, indices and fractions.
_WORD = TextPattern("{letters_digits}+(?:[.^/_]{letters_digits}+)*|{unspaced}{{1,2}}|" + NO_CONTENT)
_SENTENCE_END = re.compile(r"[.!?\n。！？](?:(?<=[\n。！？])|(?=\s))\s*")
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
    for sentence in _SENTENCE_END.split(lowered):
        said.add(_WORD.findall(sentence))
    if said.num_words < MIN_WORDS:
        return Judgement(None, f"Only {said.num_words} words: too few to judge.", (0, len(text)))
    value = min(1.0, said.new / said.num_words)
    details = (
        f"{said.new:.0f} of {said.num_words} words carry new content; {said.num_restating} in sentences that restate "
        f"an earlier one, {num_fillers} filler phrases."
    )
    return Judgement(value, details + note, (0, len(text)))


def _without_fillers(text: str) -> tuple[str, int]:
    """`text` with as many empty words as each filler phrase has words in its place, and the number of phrases."""
    found = find_phrases(text, FILLERS)
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
        self._sentences: dict[str, list[int]] = {}  # word of content -> the sentences it stood in
        self._pairs: set[tuple[str, str]] = set()
        self._num_sentences = 0

    def add(self, words: Sequence[str]) -> None:
        """One sentence."""
        self.num_words += len(words)
        content = [word for word in words if word not in EMPTY_WORDS]
        if not content:
            return
        distinct = set(content)
        restates = self._restates(distinct)
        worth = self._worth(content)
        if restates:
            self.num_restating += len(words)
        else:
            self.new += worth
        self._remember(distinct)

    def _worth(self, content: Sequence[str]) -> float:
        """First appearances, and half of those that come back beside another word than before."""
        sentences, pairs, fresh = self._sentences, self._pairs, set()
        num_first = num_beside = 0
        previous = ""
        for word in content:
            pair = (previous, word) if previous <= word else (word, previous)
            if word not in sentences and word not in fresh:
                fresh.add(word)
                num_first += 1
            elif previous and pair not in pairs:
                num_beside += 1
            pairs.add(pair)
            previous = word
        return num_first + num_beside / 2

    def _restates(self, distinct: set[str]) -> bool:
        least = _RESTATING_SHARE * len(distinct)
        places = [self._sentences[word] for word in distinct if word in self._sentences]
        if len(distinct) < _RESTATING_WORDS or len(places) < least:
            return False
        return max(Counter(chain.from_iterable(places)).values()) >= least

    def _remember(self, distinct: set[str]) -> None:
        for word in distinct:
            places = self._sentences.setdefault(word, [])
            places.append(self._num_sentences)
            if len(places) > _REMEMBERED:
                del places[1]
        self._num_sentences += 1
