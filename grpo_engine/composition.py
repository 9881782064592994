"""Composition root, the parts of a stage: config -> learner, sampler, scorers, pipeline, judges.

With `engine.py` the only file that knows all four modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.attempt import Attempt
from grpo_engine.config import RLStage, RunConfig, SFTStage
from grpo_engine.config_gates import learned_names
from grpo_engine.config_training import GAEAdvantage
from grpo_engine.data.sources import WithinContext, data_version, open_source
from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.errors import DataError
from grpo_engine.evaluation.held_out import HeldOutEvaluation, Judge
from grpo_engine.inference.reference import ReferenceScorer
from grpo_engine.inference.values import CriticScorer
from grpo_engine.learned_rewards import for_attempt
from grpo_engine.model.adapters import FrozenAdapter, has_adapter
from grpo_engine.model.loading import Policy, clone_frozen
from grpo_engine.model.value import ValueModel
from grpo_engine.pipeline.synchronous import SynchronousPipeline
from grpo_engine.protocols import PromptSource, RewardFunction, Sampler, Scorer
from grpo_engine.reward.behaviours import count_behaviours
from grpo_engine.reward.composite import Composite, build_rewards, reward_bounds
from grpo_engine.reward.resources import RewardResources
from grpo_engine.rollout.expected_lengths import ExpectedLengths
from grpo_engine.samplers import context_tokens, make_probe_for
from grpo_engine.stages.guards import Guards
from grpo_engine.stages.parts import RLParts
from grpo_engine.stages.reward_watch import RewardWatch
from grpo_engine.training.assign import assign_advantages
from grpo_engine.training.checkpoint import TRAINER
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.mtp import MTPTraining
from grpo_engine.training.objectives import PolicyObjective, SupervisedObjective
from grpo_engine.types import Completion, Group, Prompt, StageProgress

SEEDS = 2**32
"""Run seeds are below this."""
REFERENCE_FILE = "reference.safetensors"
CORRECTNESS = ("accuracy", "gym", "code_execution")
"""Kinds of reward that say whether a completion is right."""


# ---------------------------------------------------------------- training
def make_learner(attempt: Attempt, policy: Policy, progress: StageProgress) -> TorchLearner:
    """The learner of the present stage; for PPO with its critic."""
    config = attempt.config
    stage = config.stages[progress.stage_index]
    objective: SupervisedObjective | PolicyObjective = SupervisedObjective()
    value = value_config = None
    if isinstance(stage, RLStage):
        objective = PolicyObjective.from_stage(stage)
        if isinstance(stage.advantage, GAEAdvantage):
            value_config = stage.advantage.value
            value = ValueModel(policy.model, value_config.backbone, config.dtype)
    return TorchLearner(
        policy.model, stage.optimizer, num_steps=stage.num_steps, objective=objective, memory=stage.memory,
        dtype=config.dtype, pad_token_id=policy.tokenizer.pad_token_id, communicator=attempt.communicator,
        freeze_old=isinstance(stage, RLStage) and stage.steps_per_batch > 1, value=value, value_config=value_config,
        mtp=_mtp_training(config, policy), policy_version=progress.policy_version,
    )  # fmt: skip


def _mtp_training(config: RunConfig, policy: Policy) -> MTPTraining | None:
    if policy.mtp is None:
        return None
    return MTPTraining(policy.mtp, policy.model, learning_rate=config.mtp.learning_rate, dtype=config.dtype)


def make_source(attempt: Attempt, policy: Policy, progress: StageProgress) -> PromptSource:
    """The stage's prompts, held against the model's context."""
    config, index = attempt.config, progress.stage_index
    stage = config.stages[index]
    prompts = open_source(
        stage.data,
        policy.tokenizer,
        seed=config.seed + index * SEEDS,  # each stage has an order of its own
        demonstrations=isinstance(stage, SFTStage),
        field=f"stages.{index}.data",
    )
    attempt.data_versions[config.stage_key(index)] = data_version(stage.data)
    # A demonstration that does not fit is a fault of the data; a prompt without room for a completion is left out.
    return WithinContext(prompts, context_tokens(config, policy), drop=isinstance(stage, RLStage))


def encode_demonstration(policy: Policy, prompt: Prompt) -> list[int]:
    """Token ids of the prompt's demonstration with the end token. Raises DataError when the row has none."""
    text = prompt.columns.get("completion")
    if not isinstance(text, str):
        raise DataError(f"prompt {prompt.id} has no demonstration; SFT data needs a completion column with text")
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, policy.tokenizer.eos_token_id]


# ---------------------------------------------------------------- sampling and judging
def make_rewards(attempt: Attempt, stage: RLStage, stage_index: int, device: torch.device) -> Composite:
    """The stage's reward on this rank; close it. Raises RewardError when a source or a model cannot be loaded."""
    num_processes = max(1, len(os.sched_getaffinity(0)) // attempt.communicator.world_size)
    resources = RewardResources(attempt.custom_sources, attempt.config.sandbox, num_processes)
    if learned_names(stage.rewards):
        resources.learned = for_attempt(attempt, stage_index, device)
    rewards = build_rewards(stage, resources)
    attempt.reward_versions = rewards.versions
    return rewards


def make_rl_parts(
    attempt: Attempt, stage: RLStage, policy: Policy, progress: StageProgress, learner: TorchLearner, sampler: Sampler,
    source: PromptSource, reference: Scorer | None, lengths: ExpectedLengths | None, rewards: Composite,
) -> RLParts:  # fmt: skip
    config = attempt.config
    critic = None
    if learner.value is not None:
        critic = CriticScorer(
            learner.value, max_micro_batch_tokens=stage.memory.max_micro_batch_tokens,
            pad_token_id=policy.tokenizer.pad_token_id,
        )  # fmt: skip
    pipeline = SynchronousPipeline(
        source, sampler, rewards, partial(_assign, stage), reference, critic, attempt.communicator, stage.sampling,
        stage.prompts_per_step, stage.group_size, (config.seed, progress.stage_index), count_behaviours,
    )  # fmt: skip
    lowest, highest = reward_bounds(stage)
    stopper = EarlyStopper(stage.early_stopping)
    watch = RewardWatch(stage.guards.max_reward_drop, floor=lowest)
    guards = Guards(stage.guards, stage.optimizer.max_gradient_norm, watch)
    detectors = Detectors(stage.detectors, lowest_reward=lowest, highest_reward=highest)
    stopper.restore(progress.early_stopping)
    detectors.restore(progress.detectors)
    guards.restore(progress.guards)
    evaluation = _evaluation(attempt, stage, source, rewards.functions)
    probe = make_probe_for(config, policy, learner, sampler, source)
    return RLParts(pipeline, sampler, learner, evaluation, stopper, detectors, guards, probe, lengths)


def _assign(stage: RLStage, groups: list[Group], smoothed: float | None) -> tuple[list[Group], float | None]:
    return assign_advantages(groups, stage, smoothed)


def _evaluation(
    attempt: Attempt, stage: RLStage, source: PromptSource, rewards: Sequence[RewardFunction]
) -> HeldOutEvaluation:
    limit = stage.evaluation.max_new_tokens or stage.sampling.max_new_tokens
    sampling = stage.sampling.model_copy(update={"max_new_tokens": limit})
    prompts = source.held_out(stage.evaluation.num_prompts)
    name = f"{getattr(stage.data, 'task', stage.data.source)} held-out"
    return HeldOutEvaluation(name, prompts, _judge(stage, rewards), sampling, attempt.config.seed, attempt.communicator)


def _judge(stage: RLStage, rewards: Sequence[RewardFunction]) -> Judge:
    """Right means the correctness part gave 1; without one the first part decides."""
    index = next((i for i, reward in enumerate(stage.rewards) if reward.kind in CORRECTNESS), 0)

    def judge(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        return [float(part.value == 1) for part in rewards[index].score(prompts, completions)]

    return judge


# ---------------------------------------------------------------- reference
def make_reference(
    attempt: Attempt, stage: RLStage, policy: Policy, progress: StageProgress, resumed: Path | None
) -> ReferenceScorer:
    """The policy as the stage began; every checkpoint of the stage carries it, so a resumed run keeps the same one.

    With an adapter the reference is the same model under the adapter that the stage began with, off while that was
    zero. A fork whose origin measured no KL has no reference: its own starting policy becomes it."""
    kept = None
    if resumed is not None and (not attempt.forked or (resumed / TRAINER / REFERENCE_FILE).exists()):
        kept = load_file(resumed / TRAINER / REFERENCE_FILE)
    limit, pad = stage.memory.max_micro_batch_tokens, policy.tokenizer.pad_token_id
    dtype = attempt.config.dtype
    if has_adapter(policy.model):
        frozen = FrozenAdapter(policy.model, kept)
        _keep_reference(attempt, progress, frozen.tensors)
        return ReferenceScorer(
            policy.model, max_micro_batch_tokens=limit, pad_token_id=pad, dtype=dtype, around=frozen.active
        )
    reference = clone_frozen(policy)
    parameters = dict(reference.named_parameters())
    if kept is not None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
    _keep_reference(attempt, progress, parameters)
    return ReferenceScorer(reference, max_micro_batch_tokens=limit, pad_token_id=pad, dtype=dtype)


def reference_path(attempt: Attempt, progress: StageProgress) -> Path:
    return attempt.folder / "reference" / f"{attempt.config.stage_key(progress.stage_index)}.safetensors"


def _keep_reference(attempt: Attempt, progress: StageProgress, tensors: Mapping[str, Tensor]) -> None:
    """Write it where checkpoints copy it from; rank 0 alone."""
    if attempt.communicator.rank != 0:
        return
    path = reference_path(attempt, progress)
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
