"""Settings of an RL stage that each are valid, but together cannot work, or not as meant. Torch-free."""

from __future__ import annotations

from grpo_engine.checks.report import Report
from grpo_engine.config import RLStage, RunConfig
from grpo_engine.config_training import GAEAdvantage, GSPOLoss


def check_training(config: RunConfig, index: int, stage: RLStage, report: Report) -> None:
    """Stage `index` of `config`."""
    path = f"stages.{index}"
    _check_critic(stage, path, report)
    _check_kl(stage, path, report)
    _check_kl_gradient(stage, path, report)
    _check_groups(config, stage, path, report)
    if isinstance(stage.loss, GSPOLoss) and stage.loss.normalizer != "sequences":
        message = "GSPO's ratio belongs to a sequence, and this weighs long ones more"
        report.warn(f"{path}.loss.normalizer", stage.loss.normalizer, message, "set it to sequences, as in the paper")


def _check_critic(stage: RLStage, path: str, report: Report) -> None:
    if isinstance(stage.advantage, GAEAdvantage):
        steps = stage.advantage.value.warmup_steps
        if steps >= stage.num_steps:
            message = f"the critic alone would be trained in all {stage.num_steps} steps, the policy never"
            field = f"{path}.advantage.value.warmup_steps"
            report.refuse(field, steps, message, f"use less than num_steps {stage.num_steps}")
    elif stage.advantage.smooth_rewards:
        message = f"a shift of all rewards changes nothing in {stage.advantage.kind}, which compares within the group"
        report.warn(f"{path}.advantage.smooth_rewards", True, message, "leave it out, or use gae")


def _check_kl(stage: RLStage, path: str, report: Report) -> None:
    if stage.guards.action != "off" and not stage.wants_reference:
        message = "without KL to the reference the guard against an explosion sees nothing"
        report.warn(f"{path}.guards.max_kl", stage.guards.max_kl, message, "set kl.track to true")
    if stage.kl.unbiased and stage.kl.place == "reward":
        message = "only a KL in the loss has a gradient of its own to correct"
        report.warn(f"{path}.kl.unbiased", True, message, "set kl.place to loss, or leave unbiased out")


def _check_kl_gradient(stage: RLStage, path: str, report: Report) -> None:
    """Settings under which the KL's gradient is not that of the KL; docs/training/losses.md, section 5."""
    kl = stage.kl
    if kl.weight == 0:
        return
    if kl.place == "loss" and kl.estimator == "k1" and not kl.unbiased:
        message = "in the loss its expected gradient is 0: noise and no penalty"
        report.warn(f"{path}.kl.estimator", "k1", message, "set kl.unbiased to true, or use k2 or k3")
    if kl.place == "reward" and kl.estimator != "k1":
        message = "in the reward its pull on the token itself cancels near the reference"
        report.warn(f"{path}.kl.estimator", kl.estimator, message, "use k1, or set kl.place to loss")
    if kl.place == "reward" and stage.advantage.kind in ("grpo", "seed_paper", "rank"):
        message = f"{stage.advantage.kind} scales it up to full advantages in groups whose rewards are equal"
        report.warn(f"{path}.kl.place", "reward", message, "use advantage dr_grpo, rloo or gae, or kl.place loss")


def _check_groups(config: RunConfig, stage: RLStage, path: str, report: Report) -> None:
    ranks, prompts = config.needs.num_ranks, stage.prompts_per_step // stage.minibatches
    if ranks > prompts * stage.group_size:
        message = f"an update has {prompts * stage.group_size} completions, fewer than the ranks"
        report.refuse("needs.num_ranks", ranks, message, f"use at most that many, or raise {path}.prompts_per_step")
