"""TorchLearner: gradients and optimizer of one process.

Parameters are the float32 masters; `dtype` bfloat16 computes under autocast. One call of `accumulate` may hold a whole
step or a part of it; the loss sum is divided by the caller's `global_denominator` (types.global_denominator over all
rows of the step), so any split gives the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.config import OptimizerConfig
from grpo_engine.errors import NonFinite
from grpo_engine.model.logprobs import LogprobForward, TokenLogprobs, collate, micro_batches
from grpo_engine.training import learner_state
from grpo_engine.training.objectives import Objective
from grpo_engine.training.schedule import learning_rate
from grpo_engine.types import StepResult, TrainRow


class TorchLearner:
    """Implements protocols.Learner over a Hugging Face causal model that it trains in place."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig,
        *,
        num_steps: int,
        objective: Objective,
        max_micro_batch_rows: int,
        dtype: str,
        pad_token_id: int,
        policy_version: int = 0,
    ) -> None:
        """Raises ValueError when the parameters are not float32 (or float64): rounding would swallow small updates."""
        for name, parameter in model.named_parameters():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}; masters must be float32: load with that dtype"
                )
        self.model = model
        self.policy_version = policy_version
        self.schedule_step = 0
        """Calls of `step` so far, skipped ones included: the schedule follows the stage, not the applied updates."""
        self.skipped_steps = 0
        self.consecutive_skipped = 0
        self._config = optimizer
        self._num_steps = num_steps
        self._objective = objective
        self._max_micro_batch_rows = max_micro_batch_rows
        self._pad_token_id = pad_token_id
        self._forward = LogprobForward(model, dtype=dtype)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = _adamw(list(self._parameters.values()), optimizer)
        self._loss_is_finite = True

    def accumulate(self, batch: Sequence[TrainRow], global_denominator: float) -> dict[str, float]:
        """Add the batch's gradient. Returns token-weighted means over the batch's trained tokens, `loss` among them.

        A batch without trained tokens adds nothing and returns {"loss": 0.0}: other means of nothing do not exist."""
        if not (math.isfinite(global_denominator) and global_denominator > 0):
            raise ValueError(f"global_denominator {global_denominator} must be a positive number")
        num_tokens = sum(row.num_trained_tokens for row in batch)
        if num_tokens == 0:
            return {"loss": 0.0}
        totals: dict[str, Tensor] = {}
        for indices in micro_batches(batch, self._max_micro_batch_rows):
            rows = [batch[index] for index in indices]
            if not any(row.num_trained_tokens for row in rows):
                continue
            sums = self._objective(self._logprobs(rows), rows)
            (sums.loss / global_denominator).backward()  # type: ignore[no-untyped-call]
            for name, value in sums.stats.items():
                totals[name] = totals[name] + value if name in totals else value
        sums_list = torch.stack(list(totals.values())).tolist()
        means = {name: total / num_tokens for name, total in zip(totals, sums_list, strict=True)}
        self._loss_is_finite = self._loss_is_finite and math.isfinite(means["loss"])
        return means

    def step(self) -> StepResult:
        """Apply the accumulated gradient, or skip it when loss or gradient is NaN or infinite.

        A skipped step leaves weights, optimizer and policy_version as they are. Without any gradient (nothing was
        trained on) weights stay as they are too. Raises NonFinite after more than `max_skipped_steps` in a row."""
        self.schedule_step += 1
        rate = learning_rate(self._config, self.schedule_step, self._num_steps)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_gradient_norm)
        gradient_norm = float(norm)
        applied = self._loss_is_finite and math.isfinite(gradient_norm)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self.policy_version += 1
            self.consecutive_skipped = 0
        else:
            self.skipped_steps += 1
            self.consecutive_skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._loss_is_finite = True
        if self.consecutive_skipped > self._config.max_skipped_steps:
            raise NonFinite(
                f"loss or gradient was NaN or infinite in {self.consecutive_skipped} steps in a row, more than "
                f"optimizer.max_skipped_steps = {self._config.max_skipped_steps}; the weights are those of policy "
                f"version {self.policy_version}; lower optimizer.learning_rate (now {rate:g})"
            )
        return StepResult(applied=applied, gradient_norm=gradient_norm, learning_rate=rate)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """[T] log-probabilities of each row by this policy, truncated by the row's kept ids: `old_logprobs`.

        Rows meet in the same micro-batches as in `accumulate`, so the ratio of an untouched policy is exactly 1."""
        scores: list[list[float]] = [[] for _ in rows]
        for indices in micro_batches(rows, self._max_micro_batch_rows):
            batch = [rows[index] for index in indices]
            split = torch.split(self._logprobs(batch).policy, [len(row.completion_ids) for row in batch])
            for index, values in zip(indices, split, strict=True):
                scores[index] = values.tolist()
        return scores

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once (tied ones under one name), detached, in the masters' type; not copied."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Write masters, optimizer and counters. Raises RuntimeError between accumulate and step."""
        if any(parameter.grad is not None for parameter in self._parameters.values()):
            raise RuntimeError("save between accumulate and step would lose the accumulated gradient")
        counters = {name: getattr(self, name) for name in learner_state.COUNTERS}
        learner_state.write(folder, dict(self.iter_full_weights()), self._parameters, self._optimizer, counters)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit. Raises CheckpointInvalid when it belongs to another model."""
        counters = learner_state.read(folder, dict(self.iter_full_weights()), self._parameters, self._optimizer)
        for name, value in counters.items():
            setattr(self, name, value)
        self._optimizer.zero_grad(set_to_none=True)

    def _logprobs(self, rows: Sequence[TrainRow]) -> TokenLogprobs:
        batch = collate(rows, pad_token_id=self._pad_token_id, device=self._forward.device)
        return self._forward(batch, self._objective.temperature)


def _adamw(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Decay applies to matrices only; norms and biases are left alone, as Hugging Face's trainer does."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=all(p.device.type in ("cpu", "cuda") for p in parameters),
    )
