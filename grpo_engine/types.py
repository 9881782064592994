"""The records the modules hand to each other. Torch-free: tensors exist only inside a module.

Prompt -> (rollout) -> Completion -> (reward) -> RewardPart -> Rollout, G of them a Group -> (training) -> TrainRow.
Token lists are plain `list[int]`; log-probabilities are `list[float]`, float32 values in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "aborted"]
"""stop: an end token was sampled; length: the token budget or the context ran out; aborted: the sampler gave up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input of the policy.

    Example: Prompt("addition/347+285", 4411, "347+285=", [8, 9, 12, 25, 7, 13, 10, 28], {"answer": "632"})
    """

    id: str
    """Stable name of the row in its source; equal text from two rows keeps two ids."""
    position: int
    """0-based place in the stage's order; the resume point is a position."""
    text: str
    """What the model reads, after the chat template."""
    token_ids: list[int]
    columns: dict[str, Any]
    """The dataset row, gold `answer` included; JSON values only."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for one prompt. All token lists have length T (the end token included when there is one)."""

    token_ids: list[int]
    text: str
    """Decoded with special tokens kept, the end token cut off."""
    finish_reason: FinishReason
    logprobs: list[float]
    """[T] under the distribution that was sampled from (temperature and truncation applied)."""
    full_logprobs: list[float]
    """[T] under the untruncated distribution at the same temperature; KL uses these."""
    token_texts: list[str] = field(default_factory=list)
    """[T] each token decoded alone, for the token view."""
    kept_ids: list[list[int]] | None = None
    """[T][kept] token ids that truncated sampling kept, None without truncation."""
    policy_version: int = 0
    """Optimizer steps done by the policy that sampled it."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One metric's judgement of one completion."""

    name: str
    value: float | None
    """None = abstained: left out of the weighted sum, counted, never treated as 0."""
    weight: float
    explanation: str = ""
    span: tuple[int, int] | None = None
    """Character range of `Completion.text` that was judged."""
    version: str = ""
    """Name and content hash of the metric, such as `accuracy@3f9a12c4`."""
    counted: float | None = None
    """What the value counts as, after clip and gate, before its weight; None = abstained, or not yet combined."""


@dataclass(frozen=True, slots=True)
class RewardFault:
    """Why a part could not judge: a user's function that raises, a judge that does not answer."""

    part: str
    kind: str
    """Faults of one kind are told once, such as `ValueError in line 3`."""
    message: str


@dataclass(frozen=True, slots=True)
class TextVectors:
    """A text as an encoder sees it."""

    vectors: npt.NDArray[np.float32]
    """[tokens, width] hidden states, special tokens left out."""
    is_cut: bool
    """The text was longer than the encoder reads, and its end was left out."""


@dataclass(frozen=True, slots=True)
class TextScore:
    """A reward model's opinion of one answer."""

    score: float
    """Unbounded, more is better; NaN or infinite when the model is broken."""
    num_tokens: int
    """Tokens that were read, prompt included."""
    is_cut: bool
    """The text was longer than the model reads, and its end was left out."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completion + reward + advantage. The reward is never overwritten by the advantage."""

    completion: Completion
    parts: list[RewardPart]
    reward: float | None
    """Sum of weight x counted value over the parts that did not abstain, clipped; None when all did."""
    advantage: float = 0.0
    """Of the whole completion; the mean of `token_advantages` where there are any."""
    ref_logprobs: list[float] | None = None
    """[T] by the frozen reference, full distribution at the sampling temperature."""
    shaped_reward: float | None = None
    """What the advantage was computed from, where that is not `reward`: parts normalised, KL subtracted, smoothed."""
    values: list[float] | None = None
    """[T] PPO: the critic's value before each token, at sampling time."""
    token_advantages: list[float] | None = None
    """[T] PPO: advantage of each token."""
    returns: list[float] | None = None
    """[T] PPO: what the critic should have said."""
    behaviours: dict[str, int] = field(default_factory=dict)
    """How often the completion reflects, backtracks, verifies ...; never part of the reward."""


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, joined by `id` (never by position or text)."""

    id: str
    """Unique in the attempt: `<batch>-<index>`, such as `12-7`."""
    prompt: Prompt
    rollouts: list[Rollout]
    dropped: str | None = None
    """Why the group was not trained on (`zero_variance`, `all_abstained`), None when it was."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One row of a batch for the learner: T = len(completion_ids)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    advantage: float = 0.0
    rollout_logprobs: list[float] | None = None
    """[T] as sampled; None in supervised rows."""
    old_logprobs: list[float] | None = None
    """[T] what the ratio compares the policy with, frozen over the updates of a batch; None = the present forward's own
    values without gradient, so that the ratio is exactly 1 (right while a batch has one update)."""
    ref_logprobs: list[float] | None = None
    kept_ids: list[list[int]] | None = None
    loss_mask: list[bool] | None = None
    """[T] True = trained token; None = all T tokens. Built from lengths, never from the pad id."""
    token_advantages: list[float] | None = None
    """[T] PPO; None = `advantage` for every token."""
    returns: list[float] | None = None
    """[T] PPO: the critic's targets."""
    old_values: list[float] | None = None
    """[T] PPO: the critic's values when the batch came."""
    policy_mask: list[bool] | None = None
    """[T] True = token of the policy loss; None = all. Chosen by entropy; denominators count the others too."""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.completion_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Normalizer:
    """How the sum over tokens becomes a mean: each token's loss is multiplied by its row's `token_weight`, and the sum
    over the whole optimizer step (every row, accumulate call and rank) is divided by `denominator`.

    tokens: mean over all trained tokens (DAPO eq. 8). sequences: mean over sequences of their token means (GRPO, GSPO);
    sequences without a trained token count in neither. constant: sum over all judged sequences / (their number x
    `constant_tokens`) (Dr.GRPO): masked and dropped sequences count, or the divisor would not be constant; abstained
    ones do not."""

    kind: Literal["tokens", "sequences", "constant"] = "tokens"
    constant_tokens: int = 1

    def token_weight(self, row: TrainRow) -> float:
        match self.kind:
            case "tokens":
                return 1.0
            case "sequences":
                return 1.0 / max(1, row.num_trained_tokens)
            case "constant":
                return 1.0 / self.constant_tokens


TOKENS = Normalizer()


def global_denominator(rows: Sequence[TrainRow], normalizer: Normalizer = TOKENS, *, num_sampled: int = 0) -> float:
    """The one place where denominators are decided. At least 1, so that a fully masked step has loss 0, not NaN.

    The same masks that select tokens for the sum are counted here: a token left out of one is left out of both (TRL
    issue 6369). Give it every row of the step, over all accumulate calls and all ranks. `num_sampled` counts the
    sequences of the step for `constant`, when some of them are not among `rows`."""
    match normalizer.kind:
        case "tokens":
            count = sum(row.num_trained_tokens for row in rows)
        case "sequences":
            count = sum(row.num_trained_tokens > 0 for row in rows)
        case "constant":
            count = max(num_sampled, len(rows))
    return float(max(1, count))


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample. `stream` names its own random stream, so its tokens do not depend on its batch.

    Example: SampleRequest([8, 9, 12], (0, 1, 4411, 3), "1-4411")
    """

    prompt_ids: list[int]
    stream: tuple[int, ...]
    """Integers that seed this request alone, such as (run seed, stage index, prompt position, completion index)."""
    group: str
    """Requests of one group share their prompt; a sampler may prefill it once."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did, over all ranks."""

    applied: bool
    """False: skipped because gradient or loss was not finite."""
    gradient_norm: float
    """L2 norm before clipping."""
    learning_rate: float
    stats: dict[str, float] = field(default_factory=dict)
    """Means over the step's trained tokens by their names in the metric catalogue (`loss`, `policy/entropy`, …);
    `…_max` are maxima. Empty when nothing was trained on."""


@dataclass(slots=True)
class StageProgress:
    """What a stage must remember to continue exactly: stored as JSON in a checkpoint's `trainer/state.json`."""

    stage_index: int
    step: int = 0
    """Optimizer steps done in this stage."""
    policy_version: int = 0
    """Optimizer steps done in the run."""
    batch: int = 0
    """Rollout batches written in the run."""
    prompt_position: int = 0
    """Next position of the stage's prompt order."""
    num_tokens: int = 0
    """Completion tokens trained on in the run."""
    done: bool = False
    """True: the stage ended (all steps done, or stopped early); the next stage starts from these weights."""
    early_stopping: dict[str, Any] = field(default_factory=dict)
    detectors: dict[str, Any] = field(default_factory=dict)
    guards: dict[str, Any] = field(default_factory=dict)
    smoothed_reward: float | None = None
    """Of advantages with smooth_rewards."""
    lengths: dict[str, Any] = field(default_factory=dict)
    """Completion lengths that the sampler has learned, by which it orders requests; rank 0's."""
