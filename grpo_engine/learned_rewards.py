"""Reward parts that need a model or a judge: the reward's side of each is given the inference that it asks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.config import BertScoreReward, JudgeReward, RewardModelReward
from grpo_engine.errors import RewardError
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward.learned.bertscore import BertScore
from grpo_engine.reward.learned.judge import Judge
from grpo_engine.reward.learned.judge_cache import JudgeCache
from grpo_engine.reward.learned.reward_model import RewardModelPart

if TYPE_CHECKING:
    import torch

    from grpo_engine.attempt import Attempt

JUDGE = "judge"
"""Folder of an attempt with the verdicts that judges gave it."""


@dataclass(frozen=True, slots=True)
class LearnedRewards:
    """Builds learned parts: a `RewardResources.learned`. Without `folder` a judge remembers nothing but this process's
    answers."""

    device: torch.device | None = None
    """Of the models; None = the CPU."""
    stage: str = ""
    """Key of the stage, whose judges have their own limits."""
    folder: Path | None = None
    """Where judges' answers are kept."""
    earlier: Sequence[Path] = ()
    """Such folders of attempts before."""
    rank: int = 0
    world_size: int = 1

    def __call__(self, part: BertScoreReward | RewardModelReward | JudgeReward) -> RewardFunction:
        """Raises RewardError when a model folder or key cannot be used, or torch is not installed."""
        if isinstance(part, JudgeReward):
            return Judge(part, self._cache(part), share=self.world_size)
        try:
            return self._with_model(part)
        except ImportError as error:
            message = f"the part {part.kind} needs the engine's packages, and {error.name} is not installed"
            raise RewardError(message) from error

    def _with_model(self, part: BertScoreReward | RewardModelReward) -> RewardFunction:
        """torch comes with the first part that needs it; a judge does not."""
        import torch

        from grpo_engine.inference.encoder import Encoder
        from grpo_engine.inference.reward_model import RewardModel

        device = self.device or torch.device("cpu")
        if isinstance(part, BertScoreReward):
            encoder = Encoder(part.model, layer=part.layer, max_rows=part.max_rows, device=device)
            return BertScore(part, encoder)
        limit = part.max_micro_batch_tokens
        scorer = RewardModel(part.model, dtype=part.dtype, max_micro_batch_tokens=limit, device=device)
        return RewardModelPart(part, scorer)

    def _cache(self, part: JudgeReward) -> JudgeCache:
        name = f"{self.stage}-{hashlib.sha256(part.model_dump_json().encode()).hexdigest()[:8]}"
        own = self.folder / f"{name}-rank{self.rank}.jsonl" if self.folder else None
        return JudgeCache(name, own, self.earlier)


def for_attempt(attempt: Attempt, stage_index: int, device: torch.device) -> LearnedRewards:
    """The learned parts of a stage, on this rank."""
    ranks = attempt.communicator
    return LearnedRewards(
        device, attempt.config.stage_key(stage_index), attempt.folder / JUDGE, earlier_answers(attempt), ranks.rank,
        ranks.world_size,
    )  # fmt: skip


def earlier_answers(attempt: Attempt) -> list[Path]:
    """Judges' folders of the attempts before: the one that wrote the checkpoint, and this run's other ones."""
    folders = [attempt.resume.resolve().parent.parent] if attempt.resume is not None else []
    siblings = attempt.folder.resolve().parent
    if siblings.name == "attempts":
        folders += sorted(entry for entry in siblings.iterdir() if entry != attempt.folder.resolve())
    return list(dict.fromkeys(folder / JUDGE for folder in folders if (folder / JUDGE).is_dir()))
