"""What drafting brought since somebody last asked. Torch-free."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class SpeculationMetrics:
    """Sums over decoding steps; `take` gives them by the names of the metric catalogue and begins anew."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps_by_length: Counter[int] = Counter()
        self._drafted_by_depth: Counter[int] = Counter()
        self._accepted_by_depth: Counter[int] = Counter()
        self._gained = 0
        self._row_steps = 0
        self._seconds = 0.0
        self._plain_seconds = 0.0

    def add(
        self, fed: int, drafted: Integers, accepted: Integers, gained: Integers,
        seconds: float, plain_seconds: float | None,
    ) -> None:  # fmt: skip
        """A step that fed `fed` drafts a row and took `seconds`. For each row that had not ended: drafts meant, drafts
        accepted, tokens gained. `plain_seconds`: what the same rows take for one token each; None = not known."""
        self._steps_by_length[fed] += 1
        self._row_steps += len(gained)
        num_gained = int(gained.sum())
        self._gained += num_gained
        for depth in range(1, fed + 1):
            self._drafted_by_depth[depth] += int((drafted >= depth).sum())
            self._accepted_by_depth[depth] += int((accepted >= depth).sum())
        if plain_seconds is not None and len(gained):
            self._seconds += seconds
            self._plain_seconds += plain_seconds * num_gained / len(gained)

    def take(self) -> dict[str, float]:
        """rollout/drafted_tokens, accepted_share, accepted_share_<depth>, draft_length_mean, draft_length_share_<K>,
        tokens_per_forward and draft_gain since the last call; empty without a step.

        accepted_share_<depth> counts a draft as accepted only with all before it. draft_gain estimates tokens a second
        against decoding the same tokens without drafts; absent where that was never timed."""
        steps = self._steps_by_length.total()
        if steps == 0:
            return {}
        lengths, drafted = self._steps_by_length, self._drafted_by_depth
        values = {
            "rollout/drafted_tokens": float(drafted.total()),
            "rollout/draft_length_mean": sum(length * count for length, count in lengths.items()) / steps,
        }
        values |= {f"rollout/draft_length_share_{length}": lengths[length] / steps for length in sorted(lengths)}
        if self._row_steps:
            values["rollout/tokens_per_forward"] = self._gained / self._row_steps
        if drafted.total():
            values["rollout/accepted_share"] = self._accepted_by_depth.total() / drafted.total()
        for depth in sorted(depth for depth, count in drafted.items() if count):
            values[f"rollout/accepted_share_{depth}"] = self._accepted_by_depth[depth] / drafted[depth]
        if self._seconds > 0:
            values["rollout/draft_gain"] = self._plain_seconds / self._seconds
        self._clear()
        return values
