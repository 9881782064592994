"""How many drafts are accepted. Torch-free.

A step that drafts K tokens gains one token and every draft accepted before the first refusal. With a_d the share of
drafts accepted at depth d among those whose predecessors were (Leviathan et al., arXiv:2211.17192, section 3.3, with
one acceptance for each depth), a row gains on average

    E(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K   tokens.

The shares belong to policy and drafter and are learned over batches of all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_TRIALS = 256.0
"""About as many of the latest drafts decide what acceptance is at a depth."""
RETURN_TRIALS = 32.0
"""Of the drafts before a pause; the policy has changed since."""
PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS = 4.0


@dataclass(slots=True)
class Acceptance:
    """Shares of drafts accepted at each depth, given that the ones before were, over the latest drafts."""

    hits: dict[int, float] = field(default_factory=dict)
    trials: dict[int, float] = field(default_factory=dict)

    def add(self, reached: Sequence[int]) -> None:
        """`reached[d]`: rows whose first d drafts were all accepted, d = 0 ... K."""
        for depth in range(1, len(reached)):
            trials = self.trials.get(depth, 0.0) + reached[depth - 1]
            hits = self.hits.get(depth, 0.0) + reached[depth]
            fade = min(1.0, WINDOW_TRIALS / max(trials, 1.0))
            self.trials[depth], self.hits[depth] = trials * fade, hits * fade

    def fade(self) -> None:
        """Drafts stayed away: what was accepted before counts like the latest RETURN_TRIALS at most."""
        for depth, trials in self.trials.items():
            share = min(1.0, RETURN_TRIALS / max(trials, 1.0))
            self.trials[depth], self.hits[depth] = trials * share, self.hits[depth] * share

    def expected_tokens(self, length: int) -> float:
        """E(length). A depth without drafts is taken to be like the one before it."""
        total, reached, share = 1.0, 1.0, PRIOR_ACCEPTANCE
        for depth in range(1, length + 1):
            hits, trials = self.hits.get(depth, 0.0), self.trials.get(depth, 0.0)
            share = (hits + PRIOR_TRIALS * share) / (trials + PRIOR_TRIALS)
            reached *= share
            total += reached
        return total
