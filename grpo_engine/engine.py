"""Composition root: config -> parts -> run. With `composition.py` the only file that knows all four modules.

`run_attempt` trains one attempt from its config (or a checkpoint) to its end and journals how it ended. Every rank runs
it and goes the same way; rank 0 alone writes.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from grpo_engine.attempt import Attempt, starting_progress
from grpo_engine.communicator import ProcessRanks, SingleRank
from grpo_engine.composition import (
    REFERENCE_FILE,
    encode_demonstration,
    make_learner,
    make_reference,
    make_rewards,
    make_rl_parts,
    make_source,
    reference_path,
)
from grpo_engine.config import RLStage, RunConfig, SFTStage
from grpo_engine.config_rollout import TorchRollout
from grpo_engine.control import Control, SharedControl
from grpo_engine.errors import EngineError, InvalidConfig, Problem
from grpo_engine.events import Journal, NoJournal
from grpo_engine.failures import end_rank
from grpo_engine.manifest import manifest_sha256, total_bytes
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import PromptSource
from grpo_engine.provenance import git_commit, package_versions
from grpo_engine.resume import load_policy_for
from grpo_engine.reward.composite import Composite
from grpo_engine.samplers import make_lengths, make_sampler
from grpo_engine.self_test.stage import run_self_test
from grpo_engine.stages.context import Outcome, SavedCheckpoint, StageContext
from grpo_engine.stages.rl import run_rl
from grpo_engine.stages.sft import run_sft
from grpo_engine.stages.sync import send_weights
from grpo_engine.training import rng
from grpo_engine.training.checkpoint import TRAINER, remove_old, restore_rng, save_checkpoint
from grpo_engine.training.learner import TorchLearner
from grpo_engine.types import StageProgress

log = logging.getLogger("cohort")


def run_attempt(
    config: RunConfig,
    folder: Path,
    *,
    resume: Path | None,
    forked: bool = False,
    custom_sources: Mapping[str, str],
    control: Control,
    communicator: SingleRank | ProcessRanks,
) -> int:
    """Train into `folder`, a fresh attempt's directory. 0: finished or stopped, 2: config refused, 1: failed."""
    journal = Journal(folder) if communicator.rank == 0 else NoJournal()
    shared = SharedControl(control, communicator)
    parent = str(resume) if resume else None
    attempt = Attempt(config, folder, resume, forked, custom_sources, shared, communicator, journal, parent)
    try:
        outcome = _run_stages(attempt)
    except Exception as error:
        return end_rank(
            error, rank=communicator.rank, folder=folder, journal=journal, control=shared,
            ended_ranks=communicator.ended_ranks,
        )  # fmt: skip
    finally:
        journal.close()
    log.info("ended: %s", outcome)
    return 0


# ---------------------------------------------------------------- the run
def _run_stages(attempt: Attempt) -> Outcome:
    config, journal = attempt.config, attempt.journal
    progress = starting_progress(attempt)
    journal.append(
        "started", config_hash=config.hash(), resumed_from=attempt.parent, stage_index=progress.stage_index,
        step=progress.step, total_steps=config.total_steps(), versions=package_versions(), git_commit=git_commit(),
    )  # fmt: skip
    journal.append("heartbeat", next_within_s=600, doing="loading the model")
    _prepare_libraries(config, attempt.communicator.world_size)
    policy = load_policy_for(config, attempt.resume, _device(config))
    outcome: Outcome = "finished"
    resumed = attempt.resume
    while True:
        if not progress.done:
            outcome = _run_stage(attempt, policy, progress, resumed)
        elif resumed is not None:  # the stage had ended: only its exact weights are needed
            make_learner(attempt, policy, progress).load(resumed / TRAINER)
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


def _prepare_libraries(config: RunConfig, world_size: int) -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.num_threads or max(1, cores // world_size))
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
    stage = attempt.config.stages[progress.stage_index]
    learner = make_learner(attempt, policy, progress)
    if resumed is not None:
        learner.load(resumed / TRAINER)
        if attempt.forked:
            learner.rate_scale = 1.0  # rollbacks of the origin; this run's rates are as its config says
    source = make_source(attempt, policy, progress)
    context = _context(attempt, policy, learner, progress, resumed)
    if isinstance(stage, SFTStage):
        encode = partial(encode_demonstration, policy)
        run_self_test(context, policy, learner, source, None, encode)
        _restore_random(attempt, resumed)
        return run_sft(context, stage, source, learner, encode)
    context.promise(300, "loading the rewards")
    with closing(make_rewards(attempt, stage, progress.stage_index, policy.device)) as rewards:
        return _run_rl(attempt, stage, policy, progress, resumed, learner, source, context, rewards)


def _run_rl(
    attempt: Attempt, stage: RLStage, policy: Policy, progress: StageProgress, resumed: Path | None,
    learner: TorchLearner, source: PromptSource, context: StageContext, rewards: Composite,
) -> Outcome:  # fmt: skip
    reference = make_reference(attempt, stage, policy, progress, resumed) if stage.wants_reference else None
    lengths = make_lengths(attempt.config, progress)
    if not isinstance(attempt.config.rollout, TorchRollout):
        context.promise(900, "starting vLLM")
    sampler = make_sampler(
        attempt.config, policy, progress.policy_version, lengths=lengths, folder=attempt.folder,
        ranks=attempt.communicator,
    )  # fmt: skip
    with closing(sampler):
        parts = make_rl_parts(attempt, stage, policy, progress, learner, sampler, source, reference, lengths, rewards)
        send_weights(context, parts)
        run_self_test(context, policy, learner, source, sampler, None)
        _restore_random(attempt, resumed)
        return run_rl(context, stage, parts)


def _restore_random(attempt: Attempt, resumed: Path | None) -> None:
    """What draws from the global generators goes on where the checkpoint was. Last before the stage runs, since making
    the parts may draw too."""
    if resumed is not None and not attempt.forked:
        restore_rng(resumed, rank=attempt.communicator.rank)


# ---------------------------------------------------------------- checkpoints
def _context(
    attempt: Attempt, policy: Policy, learner: TorchLearner, progress: StageProgress, resumed: Path | None
) -> StageContext:
    config = attempt.config
    stage = config.stages[progress.stage_index]
    key = config.stage_key(progress.stage_index)

    def save(folder: Path, metrics: dict[str, float]) -> SavedCheckpoint:
        return _save(attempt, policy, learner, progress, folder, metrics)

    def prune(protected: Collection[Path]) -> list[Path]:
        return remove_old(attempt.folder / "checkpoints", stage.checkpoint.keep_last, key, protected)

    context = StageContext(
        config, key, attempt.folder, attempt.journal, attempt.control, attempt.communicator, progress, save, prune
    )
    if resumed is not None:
        context.saved_step = progress.step
        context.last_good = None if progress.guards.get("alarmed") else resumed
    return context


def _save(
    attempt: Attempt, policy: Policy, learner: TorchLearner, progress: StageProgress, folder: Path,
    metrics: dict[str, float],
) -> SavedCheckpoint:  # fmt: skip
    """Rank 0 writes what all ranks hold. Collective."""
    config, ranks = attempt.config, attempt.communicator
    stage = config.stages[progress.stage_index]
    _check_same_weights(attempt, policy)
    rng_states = ranks.gather(rng.capture())
    saved = None
    if ranks.rank == 0:
        has_reference = isinstance(stage, RLStage) and stage.wants_reference
        save_checkpoint(
            folder, policy=policy, learner=learner, progress=progress, stage=config.stage_key(progress.stage_index),
            config=config, parent=attempt.parent, metrics=metrics, data_versions=attempt.data_versions,
            reward_versions=attempt.reward_versions, rng_states=rng_states,
            extra_files={REFERENCE_FILE: reference_path(attempt, progress)} if has_reference else {},
        )  # fmt: skip
        saved = SavedCheckpoint(folder, total_bytes(folder), manifest_sha256(folder))
    attempt.parent = str(folder)
    told = ranks.from_first(saved)
    assert told is not None
    return told


def _check_same_weights(attempt: Attempt, policy: Policy) -> None:
    """Ranks start from the same weights and add up the same gradients; if their bits differ, something is broken."""
    if attempt.communicator.world_size == 1:
        return
    parameters = [*policy.model.parameters(), *(() if policy.mtp is None else policy.mtp.parameters())]
    sums = torch.stack([parameter.detach().double().sum() for parameter in parameters])
    bits = sums.cpu().numpy().tobytes()  # NaN is unlike itself
    if len(set(attempt.communicator.gather(bits))) > 1:
        raise EngineError("the ranks' weights have come apart; the last checkpoint before this one is still good")
