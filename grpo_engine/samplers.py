"""Composition root, module 1: config -> the sampler of its backend, and what belongs to it.

vLLM is imported only where a config asks for it: it need not be installed, and takes seconds to import.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from grpo_engine.communicator import SingleRank
from grpo_engine.config import FolderModel, RunConfig
from grpo_engine.config_rollout import MTPDrafts, TorchRollout, VLLMEngine, VLLMRollout, VLLMServerRollout
from grpo_engine.model.greedy import greedy_scores
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import Communicator, PromptSource, Sampler
from grpo_engine.rollout.expected_lengths import ExpectedLengths
from grpo_engine.rollout.mtp_drafter import MTPDrafter
from grpo_engine.rollout.speculation import Speculator, make_speculator
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.rollout.vllm.folder import write_model_folder
from grpo_engine.stages.probe import SyncProbe, make_probe
from grpo_engine.training.learner import TorchLearner
from grpo_engine.types import StageProgress


def make_sampler(
    config: RunConfig, policy: Policy, policy_version: int, *, lengths: ExpectedLengths | None = None,
    folder: Path | None = None, ranks: Communicator | None = None,
) -> Sampler:  # fmt: skip
    """The backend that the config names. Whoever makes it closes it.

    Our own decoder samples from the learner's own module and is ready. vLLM starts without the policy's weights: send
    them before the first sample. `folder` is the attempt's, where vLLM finds the model's description and its servers
    leave their logs. Raises RolloutUnavailable where vLLM is not installed or does not start."""
    rollout = config.rollout
    if isinstance(rollout, TorchRollout):
        sampler = TorchSampler(
            policy.model, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens, rollout.max_rows,
            dtype=config.dtype, shares_weights=True, speculator=_speculator(config, rollout, policy), lengths=lengths,
        )  # fmt: skip
        sampler.load_weights(iter(()), policy_version)
        return sampler
    if folder is None:
        raise ValueError(f"backend {rollout.backend} needs the attempt's folder")
    return _vllm_sampler(config, rollout, policy, folder, ranks or SingleRank())


def _speculator(config: RunConfig, rollout: TorchRollout, policy: Policy) -> Speculator | None:
    drafts, drafter = rollout.drafts, None
    if isinstance(drafts, MTPDrafts):
        assert policy.mtp is not None, "the config demands heads where drafts need them"
        drafter = MTPDrafter(policy.mtp, policy.model, max(drafts.max_tokens, drafts.fixed_tokens or 0))
    ends = torch.tensor(sorted(policy.end_token_ids), dtype=torch.long, device=policy.device)
    return make_speculator(drafts, ends, drafter, deterministic=config.deterministic)


def _vllm_sampler(
    config: RunConfig, rollout: VLLMRollout | VLLMServerRollout, policy: Policy, folder: Path, ranks: Communicator
) -> Sampler:
    described = _model_folder(config, rollout, policy, folder / f"vllm-model-{ranks.rank}")
    about = (described, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens)
    if isinstance(rollout, VLLMRollout):
        from grpo_engine.rollout.vllm.sampler import VLLMSampler

        return VLLMSampler(
            rollout, *about, dtype=config.dtype, device=policy.device, num_ranks=ranks.world_size, seed=config.seed
        )
    from grpo_engine.rollout.vllm.pool import VLLMServerSampler

    return VLLMServerSampler(
        rollout, *about, log_folder=folder, dtype=config.dtype, device=policy.device, seed=config.seed,
        rank=ranks.rank, num_ranks=ranks.world_size,
    )  # fmt: skip


def _model_folder(config: RunConfig, rollout: VLLMEngine, policy: Policy, own: Path) -> Path:
    """What vLLM starts from: config and tokenizer alone, the weights come with the first update. Draft heads are read
    at the start; those of the model itself lie in its own folder and nowhere else."""
    method = rollout.speculation.method if rollout.speculation is not None else None
    if method == "mtp" and isinstance(config.model, FolderModel):
        return Path(config.model.path)
    write_model_folder(policy.model, policy.tokenizer, own, weights=method in ("eagle", "eagle3"))
    return own


def context_tokens(config: RunConfig, policy: Policy) -> int:
    """Longest prompt plus completion: the model's context, or less where vLLM is limited to less."""
    limit = None if isinstance(config.rollout, TorchRollout) else config.rollout.max_model_len
    return min(limit or policy.max_context_tokens, policy.max_context_tokens)


def make_lengths(config: RunConfig, progress: StageProgress) -> ExpectedLengths | None:
    """What our decoder orders requests by; None where their order must follow the prompts alone."""
    if not isinstance(config.rollout, TorchRollout) or not config.rollout.sub_batches or config.deterministic:
        return None
    lengths = ExpectedLengths()
    lengths.restore(progress.lengths)
    return lengths


def make_probe_for(
    config: RunConfig, policy: Policy, learner: TorchLearner, sampler: Sampler, source: PromptSource
) -> SyncProbe | None:
    """None where the sampler reads the learner's own weights: there is nothing that an update could lose."""
    if sampler.shares_weights or isinstance(config.rollout, TorchRollout):
        return None
    return make_probe(
        config.rollout.probe, source, dtype=config.dtype, max_context_tokens=context_tokens(config, policy),
        score=partial(greedy_scores, learner.model, dtype=config.dtype),
    )  # fmt: skip
