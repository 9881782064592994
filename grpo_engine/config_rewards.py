"""What completions are rewarded for: one config class a metric, and how the parts are joined. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.config_base import Config, check_range
from grpo_engine.config_gates import under_own_kind

Extract = Literal["after_think", "boxed", "tag", "last_number", "whole"]
CodeExtract = Literal["code_block", "after_think", "whole"]


class Part(Config):
    """What every part of the reward has."""

    weight: float = Field(1.0, ge=-100, le=100)
    """Factor of this part in the reward."""
    gated_by: str | None = None
    """Name of another part, such as format: where that counts below gate_min, this one counts as 0. A second part of a
    kind is called accuracy_2. A part that abstains does not gate."""
    gate_min: float = Field(1.0, ge=0, le=1)
    """Least value of the gating part."""
    clip: tuple[float, float] | None = None
    """Lowest and highest value that counts, such as 0, 1; None = as the metric gives it."""
    normalize: Literal["none", "group", "batch"] = "none"
    """Advantages weigh the part's distance from the mean of its group or batch, in standard deviations, instead of its
    value."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> Part:
        check_range("clip", self.clip)
        return self


# ---------------------------------------------------------------- answers
class AccuracyReward(Part):
    """Answer accuracy: 1 when the extracted answer equals the gold answer (column `answer`, one or a list), else 0. Its
    kind may also be written answer_accuracy."""

    kind: Literal["accuracy"] = "accuracy"
    extract: Extract = "after_think"
    """Which span is the answer: text after </think>, the last \\boxed{}, the last tag pair, the last number, or all."""
    tag: str = Field("answer", pattern=r"^[a-zA-Z][a-zA-Z0-9_-]{0,31}$")
    """Name of the tag that `extract: tag` looks for: the last <answer>…</answer>."""
    compare: Literal["math", "number", "text"] = "math"
    """math: equal mathematically (fractions, sets, intervals, units, choices, percentages, expressions); number: equal
    as decimal numbers or as text; text: equal characters."""
    tolerance: float = Field(0.0, ge=0, le=0.5)
    """Relative difference within which numbers are equal; 0 = exactly."""
    time_limit_s: float = Field(2.0, gt=0, le=60)
    """Processor seconds for one answer, or ten times as many by the clock; after them it is judged wrong."""


class GymReward(Part):
    """The scorer that reasoning-gym ships with the task; needs reasoning_gym data."""

    kind: Literal["gym"] = "gym"
    extract: Literal["after_think", "boxed", "last_number", "whole"] = "after_think"
    """Which span is the answer that the task's scorer sees."""


class CodeExecutionReward(Part):
    """Run the completion's Python against the prompt's tests in the sandbox."""

    kind: Literal["code_execution"] = "code_execution"
    extract: CodeExtract = "code_block"
    """Which text is the program: the last fenced block (else what follows </think>), what follows </think>, or all."""
    cases: Literal["auto", "check", "asserts", "stdin"] = "auto"
    """check: columns `test` (defines check(candidate)) and `entry_point`, as in HumanEval; asserts: column `test_list`;
    stdin: columns `inputs` and `outputs`; auto: what the prompt's columns have."""
    credit: Literal["share", "all"] = "all"
    """share: the share of cases passed; all: 1 only when every case passes."""
    time_limit_s: float = Field(5.0, gt=0, le=600)
    """Wall-clock seconds for the program and all its cases."""


# ---------------------------------------------------------------- reasoning
class StepValidityReward(Part):
    """Share of the checkable steps (12*7 = 84, chains, equations transformed line to line) that are right."""

    kind: Literal["step_validity"] = "step_validity"
    weight: float = Field(0.2, ge=-100, le=100)
    """Factor of this part in the reward."""
    min_steps: int = Field(1, ge=1)
    """Abstain below this number of checkable steps."""


class LogicalConsistencyReward(Part):
    """1 unless the solution contradicts itself: conclusion against answer, a variable with two values, a claim and its
    contrary."""

    kind: Literal["logical_consistency"] = "logical_consistency"
    weight: float = Field(0.2, ge=-100, le=100)
    """Factor of this part in the reward."""
    extract: Extract = "after_think"
    """Which span is the final answer."""


# ---------------------------------------------------------------- form and language
class FormatReward(Part):
    """1 when the completion has exactly the asked structure: tags once, in order, nothing before or after."""

    kind: Literal["format"] = "format"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""
    structure: Literal["think", "think_answer"] = "think"
    """think: <think>…</think>answer; think_answer: <think>…</think><answer>…</answer> and nothing after it."""
    allow_empty_thinking: bool = True
    """Whether <think></think> with nothing in it is well formed."""


class LanguageConsistencyReward(Part):
    """Share of the words in the wanted language; code and mathematics are left out."""

    kind: Literal["language_consistency"] = "language_consistency"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""
    language: str = Field("en", pattern=r"^[a-z]{2}$")
    """Wanted language, ISO 639-1; a prompt's column `language` goes before it."""


class ReadabilityReward(Part):
    """How readable the completion is: structure, valid markdown, sentence and word statistics."""

    kind: Literal["readability"] = "readability"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""


class InformationDensityReward(Part):
    """New content per token: padding and restating lower it."""

    kind: Literal["information_density"] = "information_density"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""


class RepetitionReward(Part):
    """1 without repetition, falling with the share of repeated n-grams and with loops."""

    kind: Literal["repetition"] = "repetition"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""
    ngram: int = Field(4, ge=2, le=20)
    """Words of a repeated n-gram; twice as many characters in languages without spaces."""
    free_share: float = Field(0.2, ge=0, lt=1)
    """Share of the words inside n-grams that stood before which costs nothing."""


class LengthReward(Part):
    """How well the completion's length fits, in tokens: DAPO's soft overlong punishment, or cosine shaping."""

    kind: Literal["length"] = "length"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""
    shape: Literal["overlong", "cosine"] = "overlong"
    """overlong: 1 up to max - buffer tokens, falling linearly to 0 at max and beyond (Yu et al. 2025, equation 13, plus
    1). cosine: among right answers the shorter earn more, among wrong ones the longer (Yeo et al. 2025); the part named
    in gated_by says which are right and does not gate this one; without it all count as right."""
    max_tokens: int = Field(ge=1)
    """Length at which nothing is left."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before max_tokens over which an overlong completion loses its reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> LengthReward:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} must not exceed max_tokens {self.max_tokens}")
        return self


class InstructionFollowingReward(Part):
    """Share of the prompt's verifiable constraints (column `constraints`) that the completion keeps."""

    kind: Literal["instruction_following"] = "instruction_following"
    credit: Literal["share", "all"] = "share"
    """share: the share kept; all: 1 only when every constraint is kept."""
    extract: Extract = "after_think"
    """Which text must keep them."""


class CodeQualityReward(Part):
    """Whether the completion's Python parses, uses no undefined name, stays simple and calls nothing forbidden."""

    kind: Literal["code_quality"] = "code_quality"
    weight: float = Field(0.1, ge=-100, le=100)
    """Factor of this part in the reward."""
    extract: CodeExtract = "code_block"
    """Which text is the program."""
    max_complexity: int = Field(10, ge=1, le=100)
    """McCabe complexity of a function from which it counts as too complex."""
    forbidden_calls: list[str] = Field(["eval", "exec", "compile", "__import__", "os.system"], max_length=100)
    """Calls that make the value 0, as dotted names."""


# ---------------------------------------------------------------- learned
class BertScoreReward(Part):
    """BERTScore F1 (Zhang et al. 2020) of the answer against the gold text, over any encoder."""

    kind: Literal["bertscore"] = "bertscore"
    model: str = Field(min_length=1)
    """Folder of an encoder that AutoModel loads."""
    layer: int | None = Field(None, ge=0)
    """Hidden layer that is compared; None = the last."""
    column: str = "answer"
    """Dataset column with the text to compare with."""
    extract: Extract = "after_think"
    """Which text is compared."""
    max_rows: int = Field(32, ge=1)
    """Texts a forward."""


class RewardModelReward(Part):
    """A reward model's score of the completion: a sequence-classification checkpoint."""

    kind: Literal["reward_model"] = "reward_model"
    model: str = Field(min_length=1)
    """Folder that AutoModelForSequenceClassification loads; one label, or two of which the second is the better."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the reward model."""
    extract: Extract = "whole"
    """Which text is judged, as the answer to the prompt."""
    squash: Literal["sigmoid", "none"] = "sigmoid"
    """sigmoid maps the score into [0, 1]; none keeps it as it is."""
    max_micro_batch_tokens: int = Field(8192, ge=16)
    """Token budget of one forward."""


class JudgeReward(Part):
    """A judge behind an OpenAI-compatible endpoint scores the completion against a rubric; 10 is best."""

    kind: Literal["judge"] = "judge"
    base_url: str = Field(pattern=r"^https?://")
    """Address of the API, up to and with /v1."""
    model: str = Field(min_length=1)
    """Model name that the endpoint knows."""
    rubric: str = Field(min_length=1, max_length=20_000)
    """What the judge is told to look for."""
    extract: Extract = "whole"
    """Which text is judged, as the answer to the prompt; none, or an empty one, gets 0 unasked."""
    api_key_variable: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Environment variable of the worker that holds the key; never the key itself."""
    max_concurrent: int = Field(8, ge=1, le=256)
    """Requests at a time."""
    time_limit_s: float = Field(60.0, gt=0, le=3600)
    """Wall-clock seconds for one completion, retries included; one try may take half of what is left."""
    max_requests: int | None = Field(None, ge=1)
    """Requests of a stage after which the judge abstains; None = no limit."""
    max_cost: float | None = Field(None, gt=0)
    """Cost of a stage, in the unit of the two prices, after which the judge abstains."""
    price_per_million_prompt_tokens: float = Field(0.0, ge=0)
    """Price of a million prompt tokens, for max_cost."""
    price_per_million_completion_tokens: float = Field(0.0, ge=0)
    """Price of a million completion tokens, for max_cost."""


class CustomReward(Part):
    """A user's own function f(completions, **columns) -> list of float or None, registered by name."""

    kind: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """Registered name; its source and hash are stored with the run. Never a file path."""
    time_limit_s: float = Field(60.0, gt=0, le=3600)
    """Wall-clock seconds for one batch; then its process is ended and the batch abstains."""


RewardConfig = Annotated[
    AccuracyReward | FormatReward | LengthReward | CodeExecutionReward | StepValidityReward | LogicalConsistencyReward
    | LanguageConsistencyReward | ReadabilityReward | InformationDensityReward | RepetitionReward
    | InstructionFollowingReward | CodeQualityReward | GymReward | BertScoreReward | RewardModelReward | JudgeReward
    | CustomReward,
    Field(discriminator="kind"),
    BeforeValidator(under_own_kind),
]  # fmt: skip


class SandboxConfig(Config):
    """Limits of programs that a model wrote."""

    tier: Literal["auto", "bubblewrap", "landlock", "unsafe"] = "auto"
    """auto: the strongest that passes the self-test on this host, else refuse. unsafe, for kernels without Landlock: no
    file is guarded, and a hostile program reads, changes and deletes what the worker's user can."""
    num_slots: int | None = Field(None, ge=1, le=256)
    """Programs at a time; None = as many as the engine has cores."""
    cpu_limit_s: int = Field(10, ge=1, le=600)
    """CPU seconds of a program."""
    memory_mib: int = Field(1024, ge=64, le=65536)
    """Address space of a program."""
    file_mib: int = Field(16, ge=1, le=4096)
    """Largest file a program may write, and what its folder may hold."""
    max_processes: int = Field(64, ge=1, le=1024)
    """Threads and processes of a program."""
    output_kib: int = Field(64, ge=1, le=1024)
    """Output that is kept; more is cut."""
