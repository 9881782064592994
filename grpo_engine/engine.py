"""Composition root: config -> parts -> run. The only file that knows all four modules.

`run_attempt` trains one attempt from its config (or a checkpoint) to its end and journals how it ended.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo_engine.attempt import Attempt, starting_progress
from grpo_engine.config import FolderModel, RLStage, RunConfig, SFTStage
from grpo_engine.control import Control
from grpo_engine.data.sources import WithinContext, data_version, open_source
from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.errors import DataError, EngineError, InvalidConfig, LeaseLost, Problem
from grpo_engine.evaluation.held_out import HeldOutEvaluation, Judge
from grpo_engine.events import Journal
from grpo_engine.inference.reference import ReferenceScorer
from grpo_engine.manifest import manifest_sha256, total_bytes
from grpo_engine.model.loading import Policy, clone_frozen, load_policy
from grpo_engine.pipeline.synchronous import SynchronousPipeline
from grpo_engine.protocols import PromptSource, RewardFunction
from grpo_engine.provenance import git_commit, package_versions
from grpo_engine.reward.composite import build_rewards, combine, reward_bounds, score_all
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.stages.context import Outcome, SavedCheckpoint, StageContext
from grpo_engine.stages.rl import RLParts, run_rl
from grpo_engine.stages.sft import run_sft
from grpo_engine.training.advantages import group_advantages
from grpo_engine.training.checkpoint import TRAINER, remove_old, restore_rng, save_checkpoint
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import PolicyObjective, SupervisedObjective
from grpo_engine.types import Completion, Prompt, StageProgress

SEEDS = 2**32
"""Run seeds are below this."""
REFERENCE_FILE = "reference.safetensors"
log = logging.getLogger("cohort")


def run_attempt(
    config: RunConfig,
    folder: Path,
    *,
    resume: Path | None,
    forked: bool = False,
    custom_sources: Mapping[str, str],
    control: Control,
) -> int:
    """Train into `folder`, a fresh attempt's directory. 0: finished or stopped, 2: config refused, 1: failed."""
    journal = Journal(folder)
    parent = str(resume) if resume else None
    try:
        attempt = Attempt(config, folder, resume, forked, custom_sources, control, journal, parent)
        outcome = _run_stages(attempt)
    except LeaseLost as error:
        log.error("%s", error)
        return 1
    except Exception as error:
        return _journal_failure(journal, error)
    finally:
        journal.close()
    log.info("ended: %s", outcome)
    return 0


def _journal_failure(journal: Journal, error: Exception) -> int:
    reason, message = _reason(error), str(error) or type(error).__name__
    text = "".join(traceback.format_exception(error))
    log.error("%s: %s\n%s", reason, message, text)
    journal.append("failed", reason=reason, message=message, traceback=text)
    return 2 if isinstance(error, InvalidConfig) else 1


def _reason(error: Exception) -> str:
    if isinstance(error, EngineError):
        return error.reason
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return "storage_full"
    return "engine_crash"


# ---------------------------------------------------------------- the run
def _run_stages(attempt: Attempt) -> Outcome:
    config, journal = attempt.config, attempt.journal
    progress = starting_progress(attempt)
    journal.append(
        "started", config_hash=config.hash(), resumed_from=attempt.parent, stage_index=progress.stage_index,
        step=progress.step, total_steps=config.total_steps(), versions=package_versions(), git_commit=git_commit(),
    )  # fmt: skip
    journal.append("heartbeat", next_within_s=600, doing="loading the model")
    _prepare_libraries(config)
    model = FolderModel(path=str(attempt.resume)) if attempt.resume else config.model
    policy = load_policy(model, seed=config.seed, dtype=config.dtype, device=_device(config))
    outcome: Outcome = "finished"
    resumed = attempt.resume
    while True:
        if not progress.done:
            outcome = _run_stage(attempt, policy, progress, resumed)
        elif resumed is not None:  # the stage had ended: only its exact weights are needed
            _learner(config, policy, progress).load(resumed / TRAINER)
            _restore_random(attempt, resumed)
            outcome = "finished" if progress.step >= config.stages[progress.stage_index].num_steps else "early_stopped"
        resumed = None
        if outcome == "stopped" or progress.stage_index + 1 == len(config.stages):
            break
        progress = StageProgress(
            progress.stage_index + 1, policy_version=progress.policy_version, batch=progress.batch,
            num_tokens=progress.num_tokens,
        )  # fmt: skip
    if outcome == "stopped":
        message = f"stopped at step {progress.step} of {config.stage_key(progress.stage_index)} on request"
        journal.append("stopped", step=progress.step, message=message)
    else:
        journal.append("finished", reason=outcome)
    return outcome


def _prepare_libraries(config: RunConfig) -> None:
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the log is a file


def _device(config: RunConfig) -> torch.device:
    if config.needs.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = Problem("needs.device", "cuda", "this host has no usable CUDA device", "set needs.device to cpu")
        raise InvalidConfig([problem])
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


# ---------------------------------------------------------------- one stage
def _run_stage(attempt: Attempt, policy: Policy, progress: StageProgress, resumed: Path | None) -> Outcome:
    config = attempt.config
    stage = config.stages[progress.stage_index]
    learner = _learner(config, policy, progress)
    if resumed is not None:
        learner.load(resumed / TRAINER)
    reference = _reference(attempt, policy, progress, resumed) if _wants_reference(stage) else None
    prompts = open_source(
        stage.data,
        policy.tokenizer,
        seed=config.seed + progress.stage_index * SEEDS,  # each stage has an order of its own
        demonstrations=isinstance(stage, SFTStage),
        field=f"stages.{progress.stage_index}.data",
    )
    source = WithinContext(prompts, policy.max_context_tokens)
    attempt.data_versions[config.stage_key(progress.stage_index)] = data_version(stage.data)
    context = _context(attempt, policy, learner, progress, resumed)
    if isinstance(stage, SFTStage):
        _restore_random(attempt, resumed)
        return run_sft(context, stage, source, learner, partial(encode_demonstration, policy))
    rewards = build_rewards(stage, attempt.custom_sources)
    attempt.reward_versions = {reward.name: reward.version for reward in rewards}
    parts = _rl_parts(config, stage, policy, progress, learner, source, rewards, reference)
    _restore_random(attempt, resumed)
    return run_rl(context, stage, parts)


def _restore_random(attempt: Attempt, resumed: Path | None) -> None:
    """Users' rewards may draw from the global generators: go on where the checkpoint was. Last before the stage runs,
    since making the parts may draw too."""
    if resumed is not None and not attempt.forked:
        restore_rng(resumed)


def _learner(config: RunConfig, policy: Policy, progress: StageProgress) -> TorchLearner:
    stage = config.stages[progress.stage_index]
    objective: SupervisedObjective | PolicyObjective = SupervisedObjective()
    if isinstance(stage, RLStage):
        temperature = stage.sampling.temperature
        objective = PolicyObjective(stage.clip_low, stage.clip_high, stage.kl_weight, temperature, stage.track_kl)
    return TorchLearner(
        policy.model, stage.optimizer, num_steps=stage.num_steps, objective=objective,
        max_micro_batch_rows=stage.max_micro_batch_rows, dtype=config.dtype, pad_token_id=policy.tokenizer.pad_token_id,
        policy_version=progress.policy_version,
    )  # fmt: skip


def _rl_parts(
    config: RunConfig, stage: RLStage, policy: Policy, progress: StageProgress, learner: TorchLearner,
    source: PromptSource, rewards: Sequence[RewardFunction], reference: PreTrainedModel | None,
) -> RLParts:  # fmt: skip
    sampler = TorchSampler(
        policy.model, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens,
        fixed_shapes=config.deterministic, dtype=config.dtype,
    )  # fmt: skip
    sampler.load_weights(learner.iter_full_weights(), progress.policy_version)
    scorer = None
    if reference is not None:
        scorer = ReferenceScorer(
            reference,
            max_micro_batch_rows=stage.max_micro_batch_rows,
            pad_token_id=policy.tokenizer.pad_token_id,
            dtype=config.dtype,
        )
    pipeline = SynchronousPipeline(
        source, sampler, partial(score_all, rewards), combine,
        partial(group_advantages, normalize_std=stage.normalize_std), scorer, stage.sampling,
        stage.prompts_per_step, stage.group_size, (config.seed, progress.stage_index),
        keep_constant_groups=stage.kl_weight > 0,
    )  # fmt: skip
    stopper = EarlyStopper(stage.early_stopping)
    lowest, highest = reward_bounds(stage)
    detectors = Detectors(stage.detectors, lowest_reward=lowest, highest_reward=highest)
    if progress.step:
        stopper.restore(progress.early_stopping)
        detectors.restore(progress.detectors)
    return RLParts(pipeline, sampler, learner, _evaluation(config, stage, source, rewards), stopper, detectors)


def _evaluation(
    config: RunConfig, stage: RLStage, source: PromptSource, rewards: Sequence[RewardFunction]
) -> HeldOutEvaluation:
    limit = stage.evaluation.max_new_tokens or stage.sampling.max_new_tokens
    sampling = stage.sampling.model_copy(update={"max_new_tokens": limit})
    prompts = source.held_out(stage.evaluation.num_prompts)
    name = f"{getattr(stage.data, 'task', stage.data.source)} held-out"
    return HeldOutEvaluation(name, prompts, _judge(stage, rewards), sampling, config.seed)


def _judge(stage: RLStage, rewards: Sequence[RewardFunction]) -> Judge:
    """Right means the correctness part gave 1; without an accuracy or gym part the first part decides."""
    index = next((i for i, reward in enumerate(stage.rewards) if reward.kind in ("accuracy", "gym")), 0)

    def judge(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        return [float(part.value == 1) for part in rewards[index].score(prompts, completions)]

    return judge


def encode_demonstration(policy: Policy, prompt: Prompt) -> list[int]:
    """Token ids of the prompt's demonstration with the end token. Raises DataError when the row has none."""
    text = prompt.columns.get("completion")
    if not isinstance(text, str):
        raise DataError(f"prompt {prompt.id} has no demonstration; SFT data needs a completion column with text")
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, policy.tokenizer.eos_token_id]


# ---------------------------------------------------------------- reference and checkpoints
def _wants_reference(stage: SFTStage | RLStage) -> bool:
    return isinstance(stage, RLStage) and (stage.track_kl or stage.kl_weight > 0)


def _reference(attempt: Attempt, policy: Policy, progress: StageProgress, resumed: Path | None) -> PreTrainedModel:
    """The policy as the stage began; every checkpoint of the stage carries it, so a resumed run keeps the same one.

    A fork whose origin measured no KL has none: its own starting policy becomes the reference."""
    reference = clone_frozen(policy)
    if resumed is not None and (not attempt.forked or (resumed / TRAINER / REFERENCE_FILE).exists()):
        weights = load_file(resumed / TRAINER / REFERENCE_FILE)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(weights[name])
    path = _reference_path(attempt, progress)
    path.parent.mkdir(exist_ok=True)
    save_file({name: parameter.detach() for name, parameter in reference.named_parameters()}, path)
    return reference


def _reference_path(attempt: Attempt, progress: StageProgress) -> Path:
    return attempt.folder / "reference" / f"{attempt.config.stage_key(progress.stage_index)}.safetensors"


def _context(
    attempt: Attempt, policy: Policy, learner: TorchLearner, progress: StageProgress, resumed: Path | None
) -> StageContext:
    config = attempt.config
    stage = config.stages[progress.stage_index]
    key = config.stage_key(progress.stage_index)

    def save(folder: Path, metrics: dict[str, float]) -> SavedCheckpoint:
        extra = {REFERENCE_FILE: _reference_path(attempt, progress)} if _wants_reference(stage) else {}
        save_checkpoint(
            folder, policy=policy, learner=learner, progress=progress, stage=key, config=config, parent=attempt.parent,
            metrics=metrics, data_versions=attempt.data_versions, reward_versions=attempt.reward_versions,
            extra_files=extra,
        )  # fmt: skip
        attempt.parent = str(folder)
        return SavedCheckpoint(folder, total_bytes(folder), manifest_sha256(folder))

    def prune() -> list[Path]:
        return remove_old(attempt.folder / "checkpoints", stage.checkpoint.keep_last, key)

    context = StageContext(config, key, attempt.folder, attempt.journal, attempt.control, progress, save, prune)
    if resumed is not None:
        context.saved_step = progress.step
    return context
