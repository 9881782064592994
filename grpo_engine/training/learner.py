"""TorchLearner: gradients and optimizer of one rank, for the policy, in PPO its critic, and the heads that draft.

Parameters are the float32 masters; `dtype` bfloat16 computes under autocast. One call of `accumulate` may hold a whole
step or a part of it; the loss sum is divided by the caller's `global_denominator` (types.global_denominator over all
rows of the step and all ranks), so any split gives the same gradient.

    accumulate   forward and backward, see `micro_batching`; ranks do not meet
    step         sum over ranks ──► finite? ──► clip ──► AdamW at the schedule's rate
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.communicator import SingleRank
from grpo_engine.config_training import MemoryConfig, OptimizerConfig, ValueConfig
from grpo_engine.errors import NonFinite
from grpo_engine.model.adapters import adapter_tensors, has_adapter, merged_weights
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.memory_limit import TokenLimit
from grpo_engine.model.recompute import enable_gradient_checkpointing
from grpo_engine.model.value import ValueModel
from grpo_engine.protocols import Communicator
from grpo_engine.training import learner_state
from grpo_engine.training.entropy_mask import keep_top_entropy
from grpo_engine.training.learner_state import Counters, Part
from grpo_engine.training.micro_batching import Critic, MicroBatches
from grpo_engine.training.mtp import MTPTraining
from grpo_engine.training.objectives import Objective
from grpo_engine.training.optimizer import adamw, gradient_norm, scale_gradients, sum_gradients
from grpo_engine.training.schedule import learning_rate
from grpo_engine.training.step_totals import Names, StepValues, memory_stats, step_stats
from grpo_engine.types import StepResult, TrainRow


@dataclass(frozen=True, slots=True)
class _Report:
    """What ranks tell each other before they sum: they need not have seen the same kind of rows."""

    gradients: frozenset[str]
    """Parameters that have one."""
    names: Names
    token_limit: int


class TorchLearner:
    """Implements protocols.Learner over a Hugging Face causal model that it trains in place."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig,
        *,
        num_steps: int,
        objective: Objective,
        memory: MemoryConfig,
        dtype: str,
        pad_token_id: int,
        communicator: Communicator,
        freeze_old: bool = False,
        value: ValueModel | None = None,
        value_config: ValueConfig | None = None,
        mtp: MTPTraining | None = None,
        policy_version: int = 0,
    ) -> None:
        """`freeze_old`: `prepare` fills in old log-probabilities, as several updates of a batch need.

        Raises ValueError when parameters are not float32 (or float64): rounding would swallow small updates."""
        _require_masters(model)
        self.model = model
        self.value = value
        self.policy_version = policy_version
        self.schedule_step = 0
        """Calls of `step` so far, skipped ones included: the schedule follows the stage, not the applied updates."""
        self.skipped_steps = 0
        self.consecutive_skipped = 0
        self.rate_scale = 1.0
        """Product of the factors of all rollbacks."""
        self._config = optimizer
        self._value_config = value_config or ValueConfig()
        self._num_steps = num_steps
        self._objective = objective
        self._communicator = communicator
        self._freeze_old = freeze_old
        forward = LogprobForward(model, dtype=dtype)
        self._device = forward.device
        _recompute(model, value, memory)
        self._policy = _trained(model)
        self._critic = {} if value is None else _trained(value, prefix="value.")
        self._parameters = self._policy | self._critic
        self._mtp = mtp
        self._optimizer = adamw(self._policy, self._critic, optimizer, mtp)
        self._limit = TokenLimit(memory.max_micro_batch_tokens, self._device)
        critic = None if value is None else Critic(value, self._value_config)
        self._passes = MicroBatches(
            forward, objective, limit=self._limit, pad_token_id=pad_token_id, critic=critic,
            parameters=list(self._parameters.values()), mtp=mtp,
        )  # fmt: skip

    @property
    def max_micro_batch_tokens(self) -> int:
        """The token limit as configured, or as learned since."""
        return self._limit.tokens

    def prepare(self, batch: Sequence[TrainRow]) -> list[TrainRow]:
        """Fill in `old_logprobs` and `policy_mask` where they are needed and missing. Collective.

        Rows without trained tokens stay as they are. Give it the rows of one `accumulate` call: they meet in the same
        micro-batches there, so the first update's ratio is exactly 1. The entropy threshold is that of all ranks."""
        share = self._objective.top_entropy_share
        if not self._freeze_old and share == 1:
            return list(batch)
        places = [index for index, row in enumerate(batch) if row.num_trained_tokens]
        rows = [batch[place] for place in places]
        policy, entropy = self._passes.measure(rows)
        if self._freeze_old:
            rows = [
                replace(row, old_logprobs=own.tolist()) if row.old_logprobs is None else row
                for row, own in zip(rows, policy, strict=True)
            ]
        if share < 1:
            rows = keep_top_entropy(rows, entropy, share, self._communicator)
        prepared = list(batch)
        for place, row in zip(places, rows, strict=True):
            prepared[place] = row
        return prepared

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """[T] log-probabilities of each row by this policy, truncated by the row's kept ids."""
        return [own.tolist() for own in self._passes.measure(rows)[0]]

    def accumulate(self, batch: Sequence[TrainRow], global_denominator: float, *, rehearsal: bool = False) -> None:
        """Add the batch's gradient; rows without trained tokens are left out. Ranks do not meet.

        `rehearsal`: the policy gets its gradient while the critic warms up too, and the heads that draft get none, for
        whoever looks and discards.

        When memory runs out the step's gradient is computed again with half the token limit, which stays. Raises
        OutOfMemory when a single row does not fit, ValueError for a senseless denominator."""
        if not (math.isfinite(global_denominator) and global_denominator > 0):
            raise ValueError(f"global_denominator {global_denominator} must be a positive number")
        rows = [row for row in batch if row.num_trained_tokens]
        warming_up = self.value is not None and self.schedule_step < self._value_config.warmup_steps
        critic_only = warming_up and not rehearsal
        self._passes.accumulate(rows, global_denominator, critic_only=critic_only, with_mtp=not rehearsal)

    def gradients(self) -> dict[str, Tensor]:
        """What was accumulated on this rank, not copied, by parameter; those of the critic begin with `value.`."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def discard(self) -> dict[str, float]:
        """Drop what was accumulated; returns this rank's stats of it, for the self-test."""
        values = self._passes.totals.over_ranks(SingleRank(), self._passes.totals.names)
        self._passes.clear()
        return step_stats(values)

    # ---------------------------------------------------------------- step
    def step(self) -> StepResult:
        """Sum over ranks and apply, or skip when any rank's loss or the gradient is NaN or infinite. Collective.

        A skipped step leaves weights, optimizer and policy_version as they are. Without any gradient (nothing was
        trained on) weights stay as they are too. Raises NonFinite, on every rank, after more than `max_skipped_steps`
        in a row."""
        self.schedule_step += 1
        rate = self._set_rates()
        values = self._over_ranks()
        policy_norm, value_norm, *of_mtp = values.norms
        mtp_stats = {} if self._mtp is None else self._mtp.finish(of_mtp)
        applied = all(map(math.isfinite, (values.loss, policy_norm, value_norm)))
        if applied:
            scale_gradients(list(self._policy.values()), policy_norm, self._config.max_gradient_norm)
            scale_gradients(list(self._critic.values()), value_norm, self._config.max_gradient_norm)
            self._optimizer.step()
            self.policy_version += 1
        self.skipped_steps += not applied
        self.consecutive_skipped = 0 if applied else self.consecutive_skipped + 1
        self._passes.clear()
        if self.consecutive_skipped > self._config.max_skipped_steps:
            raise NonFinite(
                f"loss or gradient was NaN or infinite in {self.consecutive_skipped} steps in a row, more than "
                f"optimizer.max_skipped_steps = {self._config.max_skipped_steps}; the weights are those of policy "
                f"version {self.policy_version}; lower optimizer.learning_rate (now {rate:g})"
            )
        stats = step_stats(values)
        if stats:
            stats |= memory_stats(self._device, self._limit.tokens)
            stats |= {"value/gradient_norm": value_norm} if self._critic else {}
            stats |= mtp_stats
        return StepResult(applied, policy_norm, rate, stats)

    def _over_ranks(self) -> StepValues:
        """Gradients and totals become those of all ranks; the one place where ranks meet in a step."""
        own = frozenset(self.gradients())
        reports = self._communicator.gather(_Report(own, self._passes.totals.names, self._limit.tokens))
        self._limit.lower(min(report.token_limit for report in reports), "another rank ran out of memory")
        anywhere = frozenset[str]().union(*(report.gradients for report in reports))
        sum_gradients([p for name, p in self._parameters.items() if name in anywhere], self._communicator)
        norms = [gradient_norm(list(part.values()), self._device) for part in (self._policy, self._critic)]
        norms += [] if self._mtp is None else self._mtp.over_ranks(self._communicator)
        names = Names.union([report.names for report in reports])
        return self._passes.totals.over_ranks(self._communicator, names, norms)

    def _set_rates(self) -> float:
        """Of this step, for policy and critic; returns the policy's."""
        value_config = self._config.model_copy(update={"learning_rate": self._value_config.learning_rate})
        rates = {
            part: learning_rate(config, self.schedule_step, self._num_steps) * self.rate_scale
            for part, config in (("policy", self._config), ("value", value_config))
        }
        for group in self._optimizer.param_groups:
            group["lr"] = rates.get(group["part"], group["lr"])
        return rates["policy"]

    # ---------------------------------------------------------------- state
    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the plain model once (tied ones under one name), detached, in the masters' type.

        Only where an adapter is merged in are they copies."""
        return merged_weights(self.model)

    def save(self, folder: Path) -> None:
        """Write masters, optimizer and counters. Raises RuntimeError between accumulate and step."""
        if self.gradients():
            raise RuntimeError("save between accumulate and step would lose the accumulated gradient")
        counters = Counters(
            self.policy_version, self.schedule_step, self.skipped_steps, self.consecutive_skipped,
            self.rate_scale, self._limit.tokens,
        )  # fmt: skip
        learner_state.write(folder, self._parts(), self._optimizer, counters)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit. Raises CheckpointInvalid when it belongs to another model."""
        counters = asdict(self._restore(folder))
        self._limit.tokens = min(self._limit.tokens, counters.pop("max_micro_batch_tokens"))
        for name, value in counters.items():
            setattr(self, name, value)

    def roll_back(self, folder: Path, rate_factor: float) -> None:
        """Weights and optimizer as `save` wrote them; counters go on; every later rate is `rate_factor` times lower.

        Factors of several rollbacks multiply, to the same checkpoint too. Raises CheckpointInvalid as `load` does."""
        self._restore(folder)
        self.rate_scale *= rate_factor
        self.consecutive_skipped = 0  # the restored weights have skipped nothing yet

    def take_notices(self) -> list[str]:
        """A learned memory limit, in a sentence each; empty since the last call."""
        notices, self._limit.notices = self._limit.notices, []
        return notices

    def _restore(self, folder: Path) -> Counters:
        counters = learner_state.read(folder, self._parts(), self._optimizer)
        self._passes.clear()
        return counters

    def _parts(self) -> list[Part]:
        if has_adapter(self.model):
            own = adapter_tensors(self.model)
            parts = [Part(learner_state.ADAPTER, own, learner_state.OPTIMIZER, own)]
        else:
            masters = dict(self.model.named_parameters())
            parts = [Part(learner_state.MASTERS, masters, learner_state.OPTIMIZER, self._policy)]
        if self.value is not None:
            own = {name.removeprefix("value."): parameter for name, parameter in self._critic.items()}
            parts.append(Part(learner_state.VALUE, own, learner_state.VALUE_OPTIMIZER, own))
        if self._mtp is not None:
            own = self._mtp.parameters
            parts.append(Part(learner_state.MTP, own, learner_state.MTP_OPTIMIZER, own, may_differ=True))
        return parts


def _trained(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    return {f"{prefix}{name}": p for name, p in module.named_parameters() if p.requires_grad}


def _recompute(model: PreTrainedModel, value: ValueModel | None, memory: MemoryConfig) -> None:
    """Gradient checkpointing of the policy, and of a critic with a backbone of its own."""
    enable_gradient_checkpointing(model, memory.gradient_checkpointing)
    if value is not None and not value.is_shared:
        enable_gradient_checkpointing(value.model, memory.gradient_checkpointing)


def _require_masters(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"parameter {name} is {parameter.dtype}; masters must be float32: load with that dtype")
