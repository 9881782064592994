"""How long completions will be, learned from those of this run: which prompts start first, and what a straggler is.

A batch ends with its longest completion. Prompts whose completions are expected to be long therefore start first, and
what turns out longer than nearly everything seen is decoded at the end, in a small batch of its own, instead of making
every row of a large one as wide as itself.

A prompt's expectation is the run's mean length times a ratio: that of the prompt's own earlier completions, where it
was sampled before, else that of prompts of about its size. Mean and ratios forget at the rate of LEARNING, so that all
expectations follow a policy whose completions grow.

Torch-free. Nothing that is sampled depends on it, since each request has a random stream of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

LEARNING = 0.3
"""Weight of a batch against all before it."""
MAX_PROMPTS = 2048
"""Prompts remembered; those sampled longest ago are forgotten."""
MAX_LENGTHS = 1024
"""Newest completions whose lengths say what is usual."""
MIN_LENGTHS = 64
"""Completions below which nothing is called a straggler."""
STRAGGLER_SHARE = 0.05
"""Share of completions that are stragglers."""


class ExpectedLengths:
    """One sampler's memory. `order` before a batch, `learn` after it."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._sizes: dict[int, float] = {}
        """Bit length of the number of prompt tokens -> ratio to the mean."""
        self._prompts: OrderedDict[str, float] = OrderedDict()
        """Key of a prompt -> ratio to the mean; the newest last."""
        self._lengths: deque[int] = deque(maxlen=MAX_LENGTHS)

    def expected_tokens(self, prompt_ids: Sequence[int]) -> float:
        """Mean length of the prompt's completions, in tokens; 0 while nothing is known."""
        of_size = self._sizes.get(len(prompt_ids).bit_length(), 1.0)
        return self._mean * self._prompts.get(_key(prompt_ids), of_size)

    def order(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Their indices, the longest expected completions first; equal expectations stay in order."""
        expected = [self.expected_tokens(prompt_ids) for prompt_ids in prompts]
        return sorted(range(len(prompts)), key=lambda index: -expected[index])

    @property
    def straggler_tokens(self) -> int | None:
        """A completion that is longer than this is a straggler: STRAGGLER_SHARE of the newest ones were. None while too
        few are known."""
        if len(self._lengths) < MIN_LENGTHS:
            return None
        return sorted(self._lengths)[math.ceil((1 - STRAGGLER_SHARE) * len(self._lengths)) - 1]

    def learn(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """A batch's completions: the prompt of each and its number of tokens."""
        if not lengths:
            return
        mean = sum(lengths) / len(lengths)
        self._mean = _moved(self._mean, mean) if self._mean else mean
        self._lengths.extend(lengths)
        by_prompt: dict[str, list[float]] = {}
        by_size: dict[int, list[float]] = {}
        for prompt_ids, length in zip(prompts, lengths, strict=True):
            by_prompt.setdefault(_key(prompt_ids), []).append(length / mean)
            by_size.setdefault(len(prompt_ids).bit_length(), []).append(length / mean)
        for size, ratios in by_size.items():
            self._sizes[size] = _moved(self._sizes.get(size, 1.0), sum(ratios) / len(ratios))
        for key, ratios in by_prompt.items():
            ratio = sum(ratios) / len(ratios)
            self._prompts[key] = _moved(self._prompts.pop(key, ratio), ratio)
        while len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` goes on."""
        return {
            "mean": self._mean,
            "sizes": {str(size): ratio for size, ratio in self._sizes.items()},
            "prompts": list(self._prompts.items()),
            "lengths": list(self._lengths),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """As `state` told it; an empty one leaves everything to be learned."""
        if not state:
            return
        self._mean = float(state["mean"])
        self._sizes = {int(size): float(ratio) for size, ratio in state["sizes"].items()}
        self._prompts = OrderedDict((str(key), float(ratio)) for key, ratio in state["prompts"])
        self._lengths = deque(state["lengths"], maxlen=MAX_LENGTHS)


def _moved(old: float, new: float) -> float:
    return old + LEARNING * (new - old)


def _key(prompt_ids: Sequence[int]) -> str:
    """The same in every process, unlike `hash`."""
    return hashlib.blake2b(repr(list(prompt_ids)).encode(), digest_size=8).hexdigest()
