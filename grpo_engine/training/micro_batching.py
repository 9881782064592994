"""A step's forward and backward passes on one rank: packed micro-batches, computed again when memory runs out.

    rows ──► micro-batches under the token limit ──► log-probabilities ──► objective ──► backward
                                                 ├─► values ──► value loss ──► backward
                                 └─► hidden states ──► multi-token prediction ──► backward

Nothing here waits for the device or for another rank: numbers stay in `StepTotals` until the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_engine.config_training import ValueConfig
from grpo_engine.model.logprobs import LogprobForward, TokenLogprobs
from grpo_engine.model.memory_limit import TokenLimit, in_row_order, run_micro_batches
from grpo_engine.model.packing import TokenBatch, collate
from grpo_engine.model.value import ValueModel
from grpo_engine.training.mtp import MTPTraining
from grpo_engine.training.objectives import Objective, Sums, value_sums
from grpo_engine.training.step_totals import StepTotals, forget_peak
from grpo_engine.types import TrainRow


@dataclass(frozen=True, slots=True)
class Critic:
    """PPO's value model and how it is trained."""

    model: ValueModel
    config: ValueConfig


class MicroBatches:
    """The passes over the rows of one step; `totals` and the parameters' gradients are what they leave."""

    def __init__(
        self,
        forward: LogprobForward,
        objective: Objective,
        *,
        limit: TokenLimit,
        pad_token_id: int,
        critic: Critic | None,
        parameters: Sequence[Parameter],
        mtp: MTPTraining | None = None,
    ) -> None:
        self.totals = StepTotals(forward.device)
        self._forward = forward
        self._objective = objective
        self._limit = limit
        self._pad_token_id = pad_token_id
        self._critic = critic
        self._parameters = parameters
        self._mtp = mtp
        self._seen: list[tuple[list[TrainRow], float]] = []
        """What this step has gone through; gone through again when memory runs out."""

    def clear(self) -> None:
        """Forget the step: gradients, totals, rows."""
        self._seen = []
        self._drop_gradient()

    def accumulate(self, rows: list[TrainRow], denominator: float, *, critic_only: bool, with_mtp: bool = True) -> None:
        """Add the gradient of `rows`, each of which has trained tokens.

        When memory runs out, everything that this step has added is dropped and computed again in micro-batches of
        half the tokens, so that the gradient is that of a step which had them from the start. `critic_only` leaves the
        policy without gradient, `with_mtp` False the heads. Raises OutOfMemory when a single row does not fit."""

        def fits(rows: list[TrainRow], denominator: float) -> bool:
            def work(_: list[int], part: list[TrainRow]) -> None:
                self._pass(part, denominator, critic_only=critic_only, with_mtp=with_mtp)

            return run_micro_batches(rows, self._limit, work, packed=self._forward.packed)

        if not self._seen:
            forget_peak(self._forward.device)
        waiting = [(rows, denominator)]
        self._seen += waiting
        while not all(fits(*part) for part in waiting):
            self._drop_gradient()
            waiting = self._seen

    @torch.no_grad()
    def measure(self, rows: Sequence[TrainRow]) -> tuple[list[Tensor], list[Tensor]]:
        """[T] policy log-probabilities and [T] entropies of each row, on the CPU.

        Rows meet in the same micro-batches as in `accumulate` of the same rows, so their numbers have the same bits."""
        found: list[tuple[list[int], Tensor]] = []

        def work(indices: list[int], part: list[TrainRow]) -> None:
            logprobs = self._logprobs(self._collate(part))
            found.append((indices, torch.stack([logprobs.policy, logprobs.entropy])))

        while not run_micro_batches(rows, self._limit, work, packed=self._forward.packed):
            found.clear()
        pieces = in_row_order(rows, found)
        return [piece[0] for piece in pieces], [piece[1] for piece in pieces]

    def _pass(self, rows: list[TrainRow], denominator: float, *, critic_only: bool, with_mtp: bool) -> None:
        """Policy and critic first; the heads when the activations of both are gone."""
        batch = self._collate(rows)
        features = self._policy_and_critic(batch, rows, denominator, critic_only)
        if self._mtp is not None and with_mtp:
            if features is None:  # the policy's logits are not head(hidden state): the backbone runs once more
                with torch.no_grad():
                    features = self._forward.features(batch)
            self._mtp.accumulate(features, batch, rows, self._objective.temperature)

    def _policy_and_critic(
        self, batch: TokenBatch, rows: list[TrainRow], denominator: float, critic_only: bool
    ) -> Tensor | None:
        """Policy and critic with a backbone of its own run one after the other: one's activations live at a time.

        Returns the policy's hidden states [N, H], detached; None where it gave none."""
        with torch.set_grad_enabled(not critic_only):
            logprobs = self._logprobs(batch)
            sums = self._objective(logprobs, rows)
        features = logprobs.features
        detached = None if features is None else features.detach()
        self.totals.positions.watch(logprobs.features, batch, rows, scale=denominator)
        self.totals.count(rows)
        if critic_only:
            sums = replace(sums, loss=torch.zeros_like(sums.loss), parts={})
        if self._critic is not None and self._critic.model.is_shared:
            if features is None:  # as above, now with the critic's gradient
                with torch.set_grad_enabled(not critic_only):
                    features = self._forward.features(batch)
            sums = _joined(sums, self._value_sums(self._critic, batch, rows, features))
        self._differentiate(sums, denominator)
        del logprobs, sums, features
        if self._critic is not None and not self._critic.model.is_shared:
            self._differentiate(self._value_sums(self._critic, batch, rows, None), denominator)
        return detached

    def _value_sums(self, critic: Critic, batch: TokenBatch, rows: list[TrainRow], features: Tensor | None) -> Sums:
        values = critic.model.values(batch, features)
        return value_sums(values, rows, critic.config, self._objective.normalizer)

    def _differentiate(self, sums: Sums, denominator: float) -> None:
        loss = sums.loss / denominator
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self.totals.add(sums, denominator)

    def _collate(self, rows: list[TrainRow]) -> TokenBatch:
        return collate(rows, device=self._forward.device, packed=self._forward.packed, pad_token_id=self._pad_token_id)

    def _logprobs(self, batch: TokenBatch) -> TokenLogprobs:
        return self._forward(batch, self._objective.temperature, entropy_gradient=self._objective.entropy_gradient)

    def _drop_gradient(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        if self._mtp is not None:
            self._mtp.clear()
        self.totals = StepTotals(self._forward.device)


def _joined(one: Sums, other: Sums) -> Sums:
    return Sums(one.loss + other.loss, one.stats | other.stats, one.maxima | other.maxima, one.parts | other.parts)
