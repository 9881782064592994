"""How completions are sampled: the backend, speculation, and the heads that draft. The rollout part of
`grpo_engine.config`. Torch-free. docs/rollout.md explains every choice.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.config_base import Config


# ---------------------------------------------------------------- multi-token prediction
class MTPConfig(Config):
    """Heads that predict further tokens, one small block a depth, each reading the one before (DeepSeek-V3,
    arXiv:2412.19437, section 2.2). They are trained beside the policy and never change it. A model folder that is a
    checkpoint of a run with heads brings its own."""

    depth: int = Field(0, ge=0, le=5)
    """Blocks in sequence; 0 = none. Drafts longer than this use the last block again."""
    learning_rate: float = Field(1e-3, gt=0, le=1)
    """AdamW's rate of the heads; their gradient does not reach the policy."""


# ---------------------------------------------------------------- speculation of our own decoder
class Drafts(Config):
    """A draft is verified in one forward pass and accepted by exact rejection sampling: what is sampled is
    distributed as without drafts."""

    min_tokens: int = Field(2, ge=1, le=16)
    """Shortest draft that is tried."""
    max_tokens: int = Field(5, ge=1, le=16)
    """Longest draft. The length between both is learned from the time of a step and from what was accepted."""
    allow_zero: bool = True
    """Decode without drafts while that is faster, as with many rows."""
    fixed_tokens: int | None = Field(None, ge=1, le=16)
    """Always draft this many instead of learning it. Deterministic runs take min_tokens when it is not set."""

    @model_validator(mode="after")
    def _ordered(self) -> Drafts:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}")
        return self


class NoDrafts(Config):
    kind: Literal["none"] = "none"


class NgramDrafts(Drafts):
    """Drafts copied from the row's own prompt and completion: what followed the last few tokens before."""

    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(2, ge=1, le=16)
    """Fewest last tokens that must occur earlier in the row."""
    max_match: int = Field(4, ge=1, le=16)
    """Most last tokens that are looked up; longer matches are tried first."""

    @model_validator(mode="after")
    def _matches(self) -> NgramDrafts:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} must not exceed max_match {self.max_match}")
        return self


class MTPDrafts(Drafts):
    """Drafts by the policy's own multi-token prediction heads; needs mtp.depth of at least 1."""

    kind: Literal["mtp"] = "mtp"


DraftsConfig = Annotated[NoDrafts | NgramDrafts | MTPDrafts, Field(discriminator="kind")]


# ---------------------------------------------------------------- backends
class TorchRollout(Config):
    """Our own decoder, on the learner's weights: for CPU and for small models."""

    backend: Literal["torch"] = "torch"
    max_rows: int = Field(256, ge=1)
    """Completions decoded together; finished ones make room for waiting ones."""
    sub_batches: bool = True
    """Start prompts with long expected completions first and decode the last stragglers in a batch of their own, by
    the lengths seen in this run. Off in deterministic runs."""
    drafts: DraftsConfig = NoDrafts()


class ProbeConfig(Config):
    """After each update a fixed probe is sampled greedily and held against the trainer's log-probabilities."""

    num_tokens: int = Field(16, ge=1, le=1024)
    """Tokens a probe prompt."""
    tolerance_nats: float | None = Field(None, gt=0)
    """Largest difference of a token's log-probability; None = 0.001 in float32, 0.25 in bfloat16."""


class VLLMSpeculation(Config):
    """Speculative decoding inside vLLM; meant for GPUs."""

    method: Literal["ngram", "mtp", "eagle", "eagle3"]
    """ngram copies from the row's own text, mtp uses heads of the model itself, eagle and eagle3 a head in a folder."""
    num_tokens: int = Field(3, ge=1, le=16)
    """Tokens drafted a step."""
    model: str | None = None
    """Folder of the draft head; eagle and eagle3 need it."""
    max_match: int = Field(4, ge=1)
    """ngram: most last tokens that are looked up."""
    min_match: int = Field(2, ge=1)
    """ngram: fewest last tokens that must match."""

    @model_validator(mode="after")
    def _head(self) -> VLLMSpeculation:
        if self.method in ("eagle", "eagle3") and self.model is None:
            raise ValueError(f"model, the folder of its draft head, is needed by method {self.method}")
        return self

    @model_validator(mode="after")
    def _matches(self) -> VLLMSpeculation:
        if self.method == "ngram" and self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} must not exceed max_match {self.max_match}")
        return self


class VLLMEngine(Config):
    """What both ways of running vLLM share."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and completion together; None = the model's context."""
    max_rows: int = Field(256, ge=1)
    """Completions decoded together."""
    memory_share: float = Field(0.3, gt=0, le=1)
    """Share of a GPU's memory that vLLM may take, weights included."""
    cpu_cache_gib: int = Field(1, ge=1)
    """Key-value cache on CPU, GiB."""
    enforce_eager: bool | None = None
    """Run without compiled graphs: slower decoding, quicker start. None = on CPU yes, on GPUs no."""
    speculation: VLLMSpeculation | None = None
    """Speculative decoding inside vLLM; meant for GPUs."""
    probe: ProbeConfig = ProbeConfig()


class VLLMRollout(VLLMEngine):
    """vLLM inside the engine's process."""

    backend: Literal["vllm"] = "vllm"
    sleep: bool = False
    """Free vLLM's cache while the trainer works (sleep level 1) and probe again after it wakes; GPUs only."""


class VLLMServerRollout(VLLMEngine):
    """One or several vLLM servers over HTTP."""

    backend: Literal["vllm_server"] = "vllm_server"
    addresses: list[str] = Field(default_factory=list, max_length=256)
    """Servers that run already, such as http://10.0.0.5:8000; empty = each rank starts its own."""
    num_servers: int = Field(1, ge=1, le=64)
    """Servers that a rank starts when no addresses are given."""
    start_timeout_s: float = Field(900.0, gt=0)
    """From starting a server to its first answer; large models take minutes."""
    request_timeout_s: float = Field(600.0, gt=0)
    """A request without an answer for this long is sent to another server."""
    max_attempts: int = Field(3, ge=1, le=20)
    """Servers that a request is tried on before the run ends."""
    health_interval_s: float = Field(5.0, gt=0)
    """Between two looks at a server's health."""
    weights_folder: str | None = Field(None, min_length=1)
    """Folder through which servers on other hosts read the weights, seen by them under the same path; None = through
    this host's memory."""


RolloutConfig = Annotated[TorchRollout | VLLMRollout | VLLMServerRollout, Field(discriminator="backend")]
