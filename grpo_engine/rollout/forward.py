"""One forward pass of the policy during decoding: tokens in, logits and hidden states out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.model.attention import CACHE_ARGUMENT, AttentionCache
from grpo_engine.model.logprobs import head_is_separate
from grpo_engine.rollout.lean import LeanLayers


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the model says of Q tokens of B rows."""

    logits_BQV: Tensor
    """Of the next token, in the type of the forward pass."""
    hidden_BQH: Tensor | None
    """The hidden states that the output head read; None in models that do more to the logits than apply the head."""

    def select(self, rows: Tensor) -> Outputs:
        """These rows, in this order; a row may be named more than once."""
        hidden = None if self.hidden_BQH is None else self.hidden_BQH.index_select(0, rows)
        return Outputs(self.logits_BQV.index_select(0, rows), hidden)

    @staticmethod
    def joined(parts: Sequence[Outputs]) -> Outputs:
        """The rows of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        hidden = [part.hidden_BQH for part in parts if part.hidden_BQH is not None]
        return Outputs(torch.cat([part.logits_BQV for part in parts]), torch.cat(hidden) if hidden else None)


class Forward:
    """The policy's module in evaluation mode; whoever calls it takes care of autocast and inference mode."""

    def __init__(self, model: PreTrainedModel, max_context_tokens: int) -> None:
        self.model: Any = model
        self.max_context_tokens = max_context_tokens
        self.device = next(model.parameters()).device
        self._head: Any = model.get_output_embeddings() if head_is_separate(model) else None  # type: ignore[no-untyped-call]
        self._accepted = inspect.signature(model.forward).parameters
        self.lean: LeanLayers | None = None
        """Layers written out, for steps, where a probe found them exact."""
        self.uses_lean = False
        """`open_rows` says so for a batch: nobody watches the modules."""

    def step(self, ids_BQ: Tensor, positions_BQ: Tensor, cache: AttentionCache) -> Outputs:
        """Outputs of Q tokens of B rows whose earlier ones the cache holds."""
        if self.lean is None or self._head is None or not self.uses_lean:
            return self(ids_BQ, positions_BQ, {CACHE_ARGUMENT: cache})
        hidden_BQH = self.lean(ids_BQ, positions_BQ, cache)
        return Outputs(self._head(hidden_BQH), hidden_BQH)

    def __call__(
        self, ids_BQ: Tensor, positions_BQ: Tensor, arguments: Mapping[str, Any], read_N: Tensor | None = None
    ) -> Outputs:
        """Outputs of every token or, of a single sequence [1, T], of those at `read_N` as N rows, Q = 1.

        `arguments` go to the model as they are; without `attention_mask` none is built."""
        # A mask of four dimensions is taken as it is, and the attention function never looks at it.
        given = {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device), "use_cache": False}
        given |= {"input_ids": ids_BQ, **arguments}
        if "position_ids" in self._accepted:
            given["position_ids"] = positions_BQ
        if self._head is None:
            return self._with_logits(given, read_N)
        hidden_BQH: Tensor = self.model.base_model(**given).last_hidden_state
        if read_N is not None:
            hidden_BQH = hidden_BQH[0].index_select(0, read_N)[:, None]
        return Outputs(self._head(hidden_BQH), hidden_BQH)

    def tensor(self, values: npt.NDArray[Any]) -> Tensor:
        """A host array on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _with_logits(self, given: dict[str, Any], read_N: Tensor | None) -> Outputs:
        some = read_N is not None and "logits_to_keep" in self._accepted
        if some:
            given["logits_to_keep"] = read_N
        logits_BQV: Tensor = self.model(**given).logits
        if read_N is not None:
            logits_BQV = (logits_BQV[0] if some else logits_BQV[0].index_select(0, read_N))[:, None]
        return Outputs(logits_BQV, None)
