"""Module 1, rollout: batched decoding with a key-value cache over any Hugging Face causal language model.

Each request has a random stream of its own (`SampleRequest.stream`); token t is the inverse of the cumulative
distribution, in float64 and token-id order, at the stream's number t. What is sampled therefore does not depend on
which requests share the batch or in which order they come; batch shapes change logits by float noise only, and a token
can differ only where the stream's number lies within that noise of a boundary. Nothing depends on time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import DataError
from grpo_engine.rollout.choice import choose
from grpo_engine.rollout.decoding import DecodingBatch
from grpo_engine.rollout.record import Record
from grpo_engine.streams import uniforms
from grpo_engine.types import Completion, FinishReason, SampleRequest

COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share is still alive."""
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class TorchSampler:
    """Implements `protocols.Sampler`.

    The module may be a copy, or with `shares_weights` the learner's own: then `load_weights` only takes the version,
    the weights being there already (an adapter's merged copies must not be written over its base).

    At most `max_rows` requests are decoded together; requests with equal prompts share one prefill. `fixed_shapes`
    keeps finished rows in the batch, so that every forward has the shape the requests imply; slower, and needed only
    where the last bit must not depend on when other rows end. `dtype` bfloat16 computes under autocast;
    log-probabilities are float32 always.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        end_token_ids: Collection[int],
        max_context_tokens: int,
        max_rows: int = 256,
        *,
        fixed_shapes: bool = False,
        dtype: str = "float32",
        shares_weights: bool = False,
    ) -> None:
        unsupported = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYERS
        if unsupported:
            raise ValueError(f"the sampler needs a key-value cache in every layer; the model has {sorted(unsupported)}")
        self.policy_version = 0
        self._model = model
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._end_token_ids = frozenset(end_token_ids)
        self._ends_E = torch.tensor(sorted(end_token_ids), dtype=torch.long, device=self._device)
        self._max_context_tokens = max_context_tokens
        self._max_rows = max_rows
        self._fixed_shapes = fixed_shapes
        self._dtype = dtype
        self.shares_weights = shares_weights
        self._token_texts: dict[int, str] = {}

    # ------------------------------------------------------------ protocol
    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order; greedy at temperature 0, with log-probabilities at temperature 1.

        Raises DataError for a prompt that is empty or leaves no room for one token, NonFinite when the model gives NaN.
        """
        for request in requests:
            self._check_prompt(request)
        was_training = self._model.training
        self._model.train(False)
        try:
            completions: list[Completion] = []
            for start in range(0, len(requests), self._max_rows):
                chunk = requests[start : start + self._max_rows]
                with torch.inference_mode(), self._autocast():
                    record = self._decode(chunk, sampling)
                record.check_finite()
                completions.extend(self._completions(record))
            return completions
        finally:
            self._model.train(was_training)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy full weights into the module; tensors that already are the module's own are left as they are.

        With `shares_weights` nothing is read from `weights`. Raises ValueError for a name the model lacks, a wrong
        shape, or a parameter that was not given.
        """
        if not self.shares_weights:
            self._copy(weights)
        self.policy_version = policy_version

    def take_metrics(self) -> dict[str, float]:
        """Nothing yet to tell."""
        return {}

    def close(self) -> None:
        """Nothing to end: the module belongs to whoever made it."""

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters(remove_duplicate=False))
        received: set[int] = set()
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"the sampler's model has no parameter {name} of shape {tuple(tensor.shape)}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
            received.add(id(own[name]))
        absent = [name for name, parameter in own.items() if id(parameter) not in received]
        if absent:
            raise ValueError(f"{len(absent)} parameters were not given, {absent[0]} among them")

    # ------------------------------------------------------------ decoding
    def _decode(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> Record:
        budgets_N = self._budgets(requests, sampling.max_new_tokens)
        num_steps = int(budgets_N.max())
        uniforms_NT = self._uniforms(requests, num_steps) if sampling.temperature > 0 else None
        batch = DecodingBatch(self._model, [request.prompt_ids for request in requests], self._max_context_tokens)
        record = Record(len(requests), num_steps, self._device, truncated=sampling.truncated)
        rows_B = torch.arange(len(requests), device=self._device)
        for step in range(num_steps):
            numbers_B = None if uniforms_NT is None else uniforms_NT[rows_B, step]
            choice = choose(batch.logits_BV, sampling, numbers_B)
            record.write(step, rows_B, choice)
            ended_B = torch.isin(choice.tokens_B, self._ends_E) | (budgets_N[rows_B] <= step + 1)
            live_B = record.close(step, rows_B, ended_B)
            num_live = int(live_B.sum())
            if num_live == 0:
                break
            tokens_B = choice.tokens_B
            if num_live <= COMPACT_BELOW * len(rows_B) and not self._fixed_shapes:
                kept_K = live_B.nonzero()[:, 0]
                rows_B, tokens_B = rows_B[kept_K], tokens_B[kept_K]
                batch.select_rows(kept_K)
            batch.advance(tokens_B)
        return record

    def _budgets(self, requests: Sequence[SampleRequest], max_new_tokens: int) -> Tensor:
        room = [self._max_context_tokens - len(request.prompt_ids) for request in requests]
        return torch.tensor(room, device=self._device).clamp(max=max_new_tokens)

    def _uniforms(self, requests: Sequence[SampleRequest], count: int) -> Tensor:
        numbers = np.stack([uniforms(count, "sample", *request.stream) for request in requests])
        return torch.from_numpy(numbers).to(self._device)

    def _check_prompt(self, request: SampleRequest) -> None:
        length = len(request.prompt_ids)
        if length == 0:
            raise DataError(f"the prompt of group {request.group} has no tokens; give it a text")
        if length >= self._max_context_tokens:
            raise DataError(
                f"the prompt of group {request.group} has {length} tokens; the model's context of"
                f" {self._max_context_tokens} leaves no room for one more; shorten or remove it"
            )

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == "bfloat16")

    # ------------------------------------------------------------ records
    def _completions(self, record: Record) -> list[Completion]:
        kept_ids: Sequence[list[list[int]] | None] = record.kept_ids() or [None] * len(record.lengths_N)
        columns = (record.tokens_NT.tolist(), record.logprobs_NT.tolist(), record.full_logprobs_NT.tolist(), kept_ids)
        return [
            self._completion(tokens[:length], logprobs[:length], full[:length], kept)
            for length, tokens, logprobs, full, kept in zip(record.lengths_N.tolist(), *columns, strict=True)
        ]

    def _completion(
        self, tokens: list[int], logprobs: list[float], full: list[float], kept: list[list[int]] | None
    ) -> Completion:
        stopped = tokens[-1] in self._end_token_ids
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(
            token_ids=tokens,
            text=self._text(tokens[:-1] if stopped else tokens),
            finish_reason=reason,
            logprobs=logprobs,
            full_logprobs=full,
            token_texts=[self._token_text(token) for token in tokens],
            kept_ids=kept,
            policy_version=self.policy_version,
        )

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self._text([token])
        return self._token_texts[token]

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
