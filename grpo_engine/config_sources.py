"""Where a run's model and prompts come from: the discriminated parts of `grpo_engine.config`. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.config_base import Config


# ---------------------------------------------------------------- model
class FolderModel(Config):
    """A Hugging Face model folder: config, safetensors and tokenizer."""

    source: Literal["folder"] = "folder"
    path: str = Field(min_length=1)
    """Folder that AutoModelForCausalLM.from_pretrained loads; `cohort model import` makes one of SmolLM2-135M."""


class TinyLlamaModel(Config):
    """A freshly initialised Llama with one token a character, for demos and tests."""

    source: Literal["tiny_llama"] = "tiny_llama"
    hidden_size: int = Field(128, ge=8, le=4096)
    """Width of the residual stream."""
    num_layers: int = Field(4, ge=1, le=64)
    """Transformer blocks."""
    num_heads: int = Field(4, ge=1, le=64)
    """Attention heads; divides hidden_size into even parts."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the gated feed-forward layer."""
    max_context_tokens: int = Field(256, ge=16)
    """Longest prompt plus completion, in tokens."""
    initializer_std: float = Field(0.05, gt=0, lt=1)
    """Standard deviation of the initial weights; 0.05 suits a width of 128."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TinyLlamaModel:
        if self.hidden_size % (2 * self.num_heads):
            multiple = 2 * self.num_heads
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_heads = {multiple}")
        return self


ModelConfig = Annotated[FolderModel | TinyLlamaModel, Field(discriminator="source")]


# ---------------------------------------------------------------- data
class AdditionData(Config):
    """Procedural addition, `347+285=`; a tenth of all problems (by crc32) is held out and never trained on."""

    source: Literal["addition"] = "addition"
    num_digits: int = Field(3, ge=1, le=9)
    """Digits of each summand."""
    think_share: float = Field(0.3, ge=0, le=1)
    """Share of demonstrations that reason digit by digit inside <think>; the others answer at once. For SFT."""


class ReasoningGymData(Config):
    """A procedural task of the package reasoning-gym."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(min_length=1)
    """Name of the task, such as chain_sum or countdown."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's config, such as {"min_terms": 2}."""
    size: int = Field(10_000, ge=2)
    """Items generated; the last tenth is held out."""
    system_prompt: str | None = None
    """System message before the question; None sends the question alone."""
    chat_template: bool = True
    """Render the question through the tokenizer's chat template."""


class FileData(Config):
    """Rows of a JSONL or Parquet file."""

    source: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """A .jsonl or .parquet file readable by the worker."""
    prompt_column: str = "prompt"
    """Column with the prompt's text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column with the gold answer, given to rewards as `answer`; None when there is none."""
    completion_column: str = "completion"
    """Column with the demonstration; read by SFT only."""
    system_prompt: str | None = None
    """System message before the prompt."""
    chat_template: bool = False
    """Render the prompt through the tokenizer's chat template."""
    held_out_rows: int = Field(0, ge=0)
    """Last rows of the file kept for evaluation and never trained on."""


DataConfig = Annotated[AdditionData | ReasoningGymData | FileData, Field(discriminator="source")]
