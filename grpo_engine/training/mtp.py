"""How the multi-token prediction heads learn: token cross entropy on what the policy was trained on, beside it.

    loss = 1 / N  sum over depths k and trained tokens of  -log P(x_{i+k} | hidden state of slot i, x_i … x_{i+k-1})

with N the trained tokens of depth 1, at the objective's temperature, so that heads and policy are compared at equal
temperature when drafts are verified. Hidden states, embeddings and output head are read without gradient: the policy's
gradient, weights and outputs keep their bits whether there are heads or not, and a gradient of the heads that is not
finite costs the heads this step, never the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.model.logprobs import CHUNK_ELEMENTS
from grpo_engine.model.mtp import CompletionSlots, MTPHeads, embedded, shared_head
from grpo_engine.model.packing import TokenBatch
from grpo_engine.model.vocabulary import Scoring, score_hidden
from grpo_engine.protocols import Communicator
from grpo_engine.training.columns import Columns
from grpo_engine.training.losses import masked
from grpo_engine.training.optimizer import gradient_norm, scale_gradients, sum_gradients
from grpo_engine.types import TrainRow

MAX_GRADIENT_NORM = 1.0
"""Of the heads alone."""
LOSS, CORRECT, COUNT = range(3)


class MTPTraining:
    """The heads' gradient of one optimizer step on one rank. Losses are sums until the step ends and their tokens have
    been counted over all ranks, so any split of the rows gives the same gradient."""

    def __init__(self, heads: MTPHeads, model: PreTrainedModel, *, learning_rate: float, dtype: str) -> None:
        """`dtype` bfloat16 computes under autocast."""
        self.heads = heads
        self.learning_rate = learning_rate
        self.parameters = dict(heads.named_parameters())
        self._model = model
        self._dtype = dtype
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        for parameter in self.parameters.values():
            parameter.grad = None
        device = next(iter(self.parameters.values())).device
        self._sums_D3 = torch.zeros(self.heads.depth, 3, dtype=torch.float64, device=device)

    def accumulate(self, features_NH: Tensor, batch: TokenBatch, rows: Sequence[TrainRow], temperature: float) -> None:
        """Add the gradient of a micro-batch's N completion tokens. `features_NH[n]` is the policy's hidden state that
        predicts token n."""
        slots = CompletionSlots.of(batch.lengths, features_NH.device)
        trained_N = Columns(rows, batch.target_N).flags("loss_mask")
        scored = [slots.scored(depth) for depth in range(1, self.heads.depth + 1)]
        targets = torch.cat([slot + depth for depth, slot in enumerate(scored, start=1)])
        if not len(targets):
            return
        with torch.enable_grad(), self._autocast():
            vectors_NE = embedded(self._model, batch.target_N)
            features = self.heads(features_NH.detach(), vectors_NE, slots)
            features_MH = torch.cat([each.index_select(0, slot) for each, slot in zip(features, scored, strict=True)])
            head = shared_head(self._model)
            how = Scoring(temperature, max(1, CHUNK_ELEMENTS // head.weight.shape[0]))
            scores = score_hidden(head, features_MH, batch.target_N[targets], None, how)
            loss_M = masked(-scores.full, trained_N[targets])
            loss_M.sum().backward()  # type: ignore[no-untyped-call]
        counted_M = trained_N[targets]
        sums_3M = torch.stack([loss_M.detach().double(), (scores.correct & counted_M).double(), counted_M.double()])
        parts = torch.split(sums_3M, [len(slot) for slot in scored], dim=1)
        self._sums_D3 += torch.stack([part.sum(1) for part in parts])

    def over_ranks(self, communicator: Communicator) -> list[Tensor]:
        """Gradients and sums become those of all ranks. Collective. Scalars for `finish`, still on the device: the norm
        of the summed gradient, then loss, right guesses and tokens of each depth."""
        communicator.sum_([self._sums_D3])
        own = list(self.parameters.values())
        sum_gradients(own, communicator)
        return [gradient_norm(own, self._sums_D3.device), *self._sums_D3.flatten().unbind()]

    def finish(self, numbers: Sequence[float]) -> dict[str, float]:
        """With what `over_ranks` gave, on the host: the gradient becomes that of the mean, clipped, or is dropped when
        there was nothing to learn from or it is not finite. Stats of the step by their names in the catalogue."""
        norm, sums = numbers[0], [numbers[start : start + 3] for start in range(1, len(numbers), 3)]
        tokens = sums[0][COUNT]
        own = list(self.parameters.values())
        if tokens == 0 or not math.isfinite(norm):
            for parameter in own:
                parameter.grad = None
        else:
            scale_gradients(own, norm, min(norm / tokens, MAX_GRADIENT_NORM))
        stats = {}
        for depth, depth_sums in enumerate(sums, start=1):
            if depth_sums[COUNT]:
                stats[f"mtp/loss_{depth}"] = depth_sums[LOSS] / depth_sums[COUNT]
                stats[f"mtp/accuracy_{depth}"] = depth_sums[CORRECT] / depth_sums[COUNT]
        return stats

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._sums_D3.device.type, dtype=torch.bfloat16, enabled=self._dtype == "bfloat16")
