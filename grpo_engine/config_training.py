"""How a stage trains: optimizer, advantages, losses, value model, guards. The discriminated parts of
`grpo_engine.config`. Torch-free. docs/training.md derives every form.

Adding a loss is one config class here and one pure function in `training/losses.py`; an advantage likewise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.config_base import Config


class OptimizerConfig(Config):
    learning_rate: float = Field(1e-6, gt=0, le=1)
    """AdamW's peak rate. DeepSeek-R1 uses 3e-6; small models take 1e-4."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's denominator floor."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warm-up."""
    final_rate_share: float = Field(0.0, ge=0, le=1)
    """Share of learning_rate reached exactly at the last step (cosine and linear)."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this L2 norm."""
    max_skipped_steps: int = Field(5, ge=0)
    """Consecutive non-finite steps that are skipped before the run ends as non_finite."""


class MemoryConfig(Config):
    """What bounds the memory of a forward and backward pass."""

    max_micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass; rows are packed into it without padding, a longer row goes alone. Halved
    by itself, and kept halved, when the device runs out of memory."""
    gradient_checkpointing: Literal["none", "full", "attention", "feed_forward"] = "none"
    """Recompute whole layers, or only their attention or feed-forward part, in the backward pass instead of keeping
    their activations."""


# ---------------------------------------------------------------- advantages
class AdvantageForm(Config):
    smooth_rewards: bool = False
    """Shift the batch's rewards so that their mean is the smoothed reward (0.9 old + 0.1 new). Group-relative forms are
    unchanged by a shift, and so is their gradient; only PPO's values see steadier returns."""


class GRPOAdvantage(AdvantageForm):
    """(reward - mean) / sample standard deviation of the group; 0 in a group without variance. DeepSeekMath."""

    kind: Literal["grpo"] = "grpo"


class SeedPaperAdvantage(AdvantageForm):
    """(reward - mean) / (population standard deviation + 1e-8), then centred again."""

    kind: Literal["seed_paper"] = "seed_paper"


class DrGRPOAdvantage(AdvantageForm):
    """reward - mean of the group, not divided: no bias towards easy and hard prompts. Dr.GRPO."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RLOOAdvantage(AdvantageForm):
    """reward - mean of the group's other rewards: REINFORCE with a leave-one-out baseline."""

    kind: Literal["rloo"] = "rloo"


class RankAdvantage(AdvantageForm):
    """Rank within the group, ties averaged, scaled to [-1, 1]: blind to the size of reward differences."""

    kind: Literal["rank"] = "rank"


class ValueConfig(Config):
    """PPO's critic."""

    backbone: Literal["copied", "shared"] = "copied"
    """copied: a second model, as large as the policy; shared: a head on the policy's hidden states."""
    learning_rate: float = Field(1e-5, gt=0, le=1)
    """AdamW's rate for the critic; it follows the policy's warm-up and schedule."""
    loss_weight: float = Field(0.5, gt=0)
    """Factor of the value loss; matters only for a shared backbone, where it pulls at the policy too."""
    clip: float | None = Field(0.2, gt=0)
    """Values may move this far from the old ones before their loss is clipped; None does not clip."""
    warmup_steps: int = Field(0, ge=0)
    """First steps of the stage that train the critic alone."""


class GAEAdvantage(AdvantageForm):
    """PPO: generalised advantage estimation with a value model, a token at a time."""

    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Decay of the temporal differences: 1 = whole returns, 0 = one step."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount a token."""
    whiten: bool = True
    """Scale the batch's token advantages to mean 0 and standard deviation 1."""
    value: ValueConfig = ValueConfig()


AdvantageConfig = Annotated[
    GRPOAdvantage | SeedPaperAdvantage | DrGRPOAdvantage | RLOOAdvantage | RankAdvantage | GAEAdvantage,
    Field(discriminator="kind"),
]


# ---------------------------------------------------------------- losses
NormalizerKind = Literal["tokens", "sequences", "constant"]


class ClipLoss(Config):
    """PPO's clipped surrogate with separate bounds. With `tokens` DAPO's, with `sequences` GRPO's, with `constant`
    Dr.GRPO's."""

    kind: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0, le=10)
    """Ratio is clipped above 1 + clip_high; DAPO raises it to 0.28."""
    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage the loss is at most this times |advantage| (3 is usual); None does not bound it."""
    normalizer: NormalizerKind = "tokens"
    """Mean over all trained tokens; over sequences of their token means; or sum over sequences divided by
    sampling.max_new_tokens, whatever their lengths."""


class GSPOLoss(Config):
    """Clipped surrogate on the sequence's ratio, the geometric mean of its tokens' ratios."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """Sequence ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0, le=10)
    """Sequence ratio is clipped above 1 + clip_high."""
    normalizer: NormalizerKind = "sequences"
    """As in clip; only `sequences` is the paper's form."""


class CISPOLoss(Config):
    """REINFORCE with clipped, detached importance weights: every token keeps its gradient."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, gt=0, lt=1)
    """Weights are raised to at least 1 - clip_low; None has no lower bound, as in the paper's runs."""
    clip_high: float = Field(4.0, gt=0)
    """Weights are cut at 1 + clip_high. TRL's epsilon_high is that cap itself: its 5.0 is 4.0 here."""
    normalizer: NormalizerKind = "tokens"
    """As in clip."""


LossConfig = Annotated[ClipLoss | GSPOLoss | CISPOLoss, Field(discriminator="kind")]


class KLConfig(Config):
    """KL divergence of the policy from the frozen reference, estimated from the sampled tokens."""

    weight: float = Field(0.0, ge=0)
    """Factor of the KL; 0 trains without. R1 uses 0.001."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With x = log reference - log policy: k1 = -x, k2 = x²/2, k3 = exp(x) - x - 1. In the loss k1 has no gradient in
    expectation unless unbiased; in the reward k1 is the unbiased one."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss a token at a time, or subtracted from the reward before advantages (a token at a time in PPO)."""
    unbiased: bool = False
    """Weigh the loss's KL by the importance ratio, with gradient, so that its gradient is that of the KL itself."""
    track: bool = True
    """Measure KL to the stage's starting policy even when weight is 0 (one more forward a step)."""


class EntropyConfig(Config):
    bonus: float = Field(0.0, ge=0)
    """The entropy times this is subtracted from each token's loss, under the loss's normalizer; 0 leaves it out."""
    top_share: float = Field(1.0, gt=0, le=1)
    """Policy loss on this share of the step's tokens, those of highest entropy; 0.2 in "Beyond the 80/20 rule"."""


class CorrectionConfig(Config):
    """Importance weights from the sampler's log-probabilities to the trainer's own, once a batch, without gradient."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """truncate cuts weights into [min_weight, max_weight]; mask drops what lies outside and keeps the weight inside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of a token, of the whole sequence (a product), or the geometric mean of its tokens' weights (mask only:
    it decides alone, without the length bias of the product, and what is kept has weight 1)."""
    min_weight: float = Field(0.0, ge=0, le=1)
    """Lower bound."""
    max_weight: float = Field(2.0, ge=1)
    """Upper bound."""

    @model_validator(mode="after")
    def _geometric_masks(self) -> CorrectionConfig:
        if self.kind == "truncate" and self.level == "geometric":
            raise ValueError("level geometric only decides what to drop; set kind to mask")
        return self


class AuxiliaryConfig(Config):
    """Next-token cross entropy on sampled completions beside the policy loss."""

    weight: float = Field(0.0, ge=0)
    """Factor of the term; 0 leaves it out."""
    rows: Literal["positive", "all"] = "positive"
    """Completions with a positive advantage, or all of them (which on-policy has no gradient in expectation)."""


class GuardsConfig(Config):
    """What to do when training leaves the rails."""

    action: Literal["off", "report", "rollback"] = "report"
    """report tells a finding; rollback also restores weights and optimizer of the last good checkpoint and lowers the
    learning rate. Steps go on counting."""
    max_kl: float = Field(1.0, gt=0)
    """KL to the reference, nats a token, above which the policy counts as exploded; needs kl.track."""
    max_reward_drop: float | None = Field(0.3, gt=0, lt=1)
    """In two batches running, or over four together, the mean reward has lost this share of the best one's height above
    the lowest possible reward, beyond doubt: the policy has collapsed. None = not watched, for data that grows harder
    by design."""
    spike_factor: float = Field(10.0, gt=1)
    """A gradient norm or |loss| this many times its median over the last spike_window steps is a spike."""
    spike_window: int = Field(20, ge=5)
    """Steps of that median; without as many there is no spike yet."""
    rate_factor: float = Field(0.5, gt=0, le=1)
    """The learning rate is multiplied by this after each rollback."""
    max_rollbacks: int = Field(5, ge=1)
    """Rollbacks of a stage after which the run ends."""


# ---------------------------------------------------------------- adapters
class NoAdapter(Config):
    """All weights are trained."""

    kind: Literal["none"] = "none"


class LoraAdapter(Config):
    """Low-rank adapters (peft); the base's weights are never touched."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, le=1024)
    """Rank of each adapter."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    target_modules: list[str] = Field(default_factory=list)
    """Names of the linear layers that get one, such as q_proj; empty = every linear layer but the output head."""


AdapterConfig = Annotated[NoAdapter | LoraAdapter, Field(discriminator="kind")]
