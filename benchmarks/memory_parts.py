"""One process of `benchmarks.memory`: a learner with all that an algorithm needs, two steps, bytes by part."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.memory import LENGTHS, make_rows
from benchmarks.our_update import rl_stage
from benchmarks.trl_update import memory
from grpo_engine.communicator import SingleRank
from grpo_engine.config import FolderModel, RLStage
from grpo_engine.config_training import GAEAdvantage, OptimizerConfig
from grpo_engine.inference.reference import ReferenceScorer
from grpo_engine.inference.values import CriticScorer
from grpo_engine.model.loading import Policy, clone_frozen, load_policy
from grpo_engine.model.value import ValueModel
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.types import Normalizer, TrainRow, global_denominator

MICRO_BATCH_TOKENS = 4 * (max(LENGTHS) + 64)
STEPS = 3


class Held:
    """Bytes that autograd keeps for the backward pass, now and at their highest; a storage counts once."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._users: dict[int, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        users = self._users.get(storage.data_ptr(), 0)
        self._users[storage.data_ptr()] = users + 1
        self.now += 0 if users else storage.nbytes()
        self.peak = max(self.peak, self.now)

    def remove(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        self._users[storage.data_ptr()] -= 1
        if self._users[storage.data_ptr()] == 0:
            del self._users[storage.data_ptr()]
            self.now -= storage.nbytes()


class _Saved:
    """One saved tensor, as long as the graph keeps it."""

    def __init__(self, held: Held, tensor: Tensor) -> None:
        self.tensor, self._held = tensor, held
        held.add(tensor)

    def __del__(self) -> None:
        self._held.remove(self.tensor)


def parts(algorithm: str, length: int, model: str) -> dict[str, Any]:
    """Bytes by part, peak allocation by their sum, resident high-water, seconds of the fastest later step."""
    stage = make_stage(algorithm, length)
    policy = load_policy(FolderModel(path=model), seed=0, dtype="float32", device=torch.device("cpu"))
    reference = clone_frozen(policy)
    value = make_value(stage, policy)
    learner = make_learner(stage, policy, value)
    rows = given_rows(length)
    held = Held([*policy.model.parameters(), *([] if value is None else value.parameters())])
    scorer = ReferenceScorer(reference, max_micro_batch_tokens=MICRO_BATCH_TOKENS, pad_token_id=0, dtype="float32")
    critic = None if value is None else CriticScorer(value, max_micro_batch_tokens=MICRO_BATCH_TOKENS)
    seconds, gradients = [], 0
    for number in range(STEPS):
        started = time.perf_counter()
        scorer.score(rows, 1.0)
        if critic is not None:
            critic.values(rows)
        denominator = global_denominator(rows, Normalizer("tokens"))
        if number == 0:
            with held.hooks():
                learner.accumulate(rows, denominator)
        else:
            learner.accumulate(rows, denominator)
        gradients = sum(nbytes([gradient]) for gradient in learner.gradients().values())
        learner.step()
        seconds.append(time.perf_counter() - started)
    own = {
        "weights": nbytes(policy.model.parameters()),
        "gradients": gradients,
        "optimizer": optimizer_bytes(learner),
        "activations": held.peak,
        "value model": 0 if value is None else nbytes(parameter for _, parameter in value.named_parameters()),
        "reference": nbytes(reference.parameters()),
    }
    return own | {"allocated": sum(own.values()), "resident": memory()["peak"], "step_s": min(seconds[1:])}


def make_stage(algorithm: str, length: int) -> RLStage:
    backbone = {"ppo_copied": "copied", "ppo_shared": "shared"}.get(algorithm)
    fields: dict[str, Any] = {"loss": {"kind": "clip"}}
    if backbone is not None:
        fields["advantage"] = {"kind": "gae", "value": {"backbone": backbone}}
    job = {
        "max_completion_length": length,
        "max_micro_batch_tokens": MICRO_BATCH_TOKENS,
        "gradient_checkpointing": "none",
        "stage": fields,
    }
    return rl_stage(job)


def make_value(stage: RLStage, policy: Policy) -> ValueModel | None:
    if not isinstance(stage.advantage, GAEAdvantage):
        return None
    return ValueModel(policy.model, stage.advantage.value.backbone, "float32")


def make_learner(stage: RLStage, policy: Policy, value: ValueModel | None) -> TorchLearner:
    gae = stage.advantage
    return TorchLearner(
        policy.model,
        OptimizerConfig(),
        num_steps=100,
        objective=PolicyObjective.from_stage(stage),
        memory=stage.memory,
        dtype="float32",
        pad_token_id=0,
        communicator=SingleRank(),
        value=value,
        value_config=gae.value if isinstance(gae, GAEAdvantage) else None,
    )


def given_rows(length: int) -> list[TrainRow]:
    """As the pipeline would hand them over: GRPO ignores what only PPO reads."""
    rows = []
    for row in make_rows(length):
        sign = 1.0 if row["win"] else -1.0
        rows.append(
            TrainRow(
                row["prompt_ids"],
                row["completion_ids"],
                advantage=sign,
                rollout_logprobs=[-4.0] * length,
                returns=[sign] * length,
                old_values=[0.0] * length,
            )
        )
    return rows


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_bytes(learner: TorchLearner) -> int:
    """Moments and step counts of AdamW."""
    states = learner._optimizer.state.values()
    return sum(nbytes(value for value in state.values() if isinstance(value, Tensor)) for state in states)
