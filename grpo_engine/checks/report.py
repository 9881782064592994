"""What a preflight found, as JSON. Torch-free."""

from __future__ import annotations

from pydantic import BaseModel, Field

from grpo_engine.errors import Problem


class RenderedPrompt(BaseModel):
    """One prompt as the model will read it."""

    stage: str
    """Index and kind, such as 1-rl."""
    id: str
    text: str
    num_tokens: int
    answer: str | None = None


class GoldReward(BaseModel):
    """What a reward part gives a completion that holds the gold answer."""

    stage: str
    part: str
    prompt_id: str
    completion: str
    value: float | None
    explanation: str


class StageData(BaseModel):
    """What was read of a stage's data."""

    stage: str
    source: str
    num_rows: int | None
    """Rows to train on; None when the source is endless."""
    num_held_out: int
    num_checked: int
    longest_prompt_tokens: int
    """Of those that a run uses."""


class Report(BaseModel):
    """The whole outcome. No problems: the run can start."""

    problems: list[Problem] = Field(default_factory=list)
    warnings: list[Problem] = Field(default_factory=list)
    """Things that will work, but perhaps not as meant."""
    prompts: list[RenderedPrompt] = Field(default_factory=list)
    """Three of each stage."""
    gold_rewards: list[GoldReward] = Field(default_factory=list)
    data: list[StageData] = Field(default_factory=list)
    memory: dict[str, int] = Field(default_factory=dict)
    """Bytes by use, `total_bytes` and `available_bytes` among them; empty when the model is unknown."""
    seconds: float = 0.0

    def refuse(self, field: str, value: object, message: str, remedy: str) -> None:
        self.problems.append(Problem(field, str(value)[:200], message, remedy))

    def warn(self, field: str, value: object, message: str, remedy: str) -> None:
        self.warnings.append(Problem(field, str(value)[:200], message, remedy))
