"""Module 1, rollout: batched decoding with a key-value cache over any Hugging Face causal language model.

Each request has random streams of its own (`SampleRequest.stream`); token t is the inverse of the cumulative
distribution, in token-id order, at number t of the stream `sample`. What is sampled therefore does not depend on which
requests share the batch or in which order they come; batch shapes change logits by float noise only, and a token can
differ only where the stream's number lies within that noise of a boundary. (Drafts that are sampled keep the
distribution, not the tokens; docs/rollout.md.)

Deterministic runs need no fixed shapes: rows start, leave and are refilled by requests and weights alone, never by
time, so equal calls give equal bits. Only what is learned in a run, expected lengths and draft lengths, must be left
out of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import DataError
from grpo_engine.rollout.decoding import Decoding, Limits
from grpo_engine.rollout.expected_lengths import ExpectedLengths
from grpo_engine.rollout.forward import Forward
from grpo_engine.rollout.open_rows import open_rows, shared_rows_are_exact
from grpo_engine.rollout.record import Sampled
from grpo_engine.rollout.speculation import Speculator
from grpo_engine.rollout.stop_texts import StopTexts
from grpo_engine.rollout.waiting import Waiting
from grpo_engine.types import Completion, FinishReason, SampleRequest

ROOM_TOKENS = 256
"""Tokens of a completion that are reserved at first."""
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class TorchSampler:
    """Implements `protocols.Sampler`.

    The module may be a copy, or with `shares_weights` the learner's own: then `load_weights` only takes the version,
    the weights being there already (an adapter's merged copies must not be written over its base).

    At most `max_rows` requests are decoded together; when some end, waiting ones take their places. Requests with
    equal prompts share one prefill and its keys and values. `dtype` bfloat16 computes under autocast; log-probabilities
    are float32 always. With a `speculator` steps draft and verify; with `lengths` prompts with long expected
    completions start first, and stragglers wait until all others have started.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        end_token_ids: Collection[int],
        max_context_tokens: int,
        max_rows: int = 256,
        *,
        dtype: str = "float32",
        shares_weights: bool = False,
        speculator: Speculator | None = None,
        lengths: ExpectedLengths | None = None,
    ) -> None:
        unsupported = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYERS
        if unsupported:
            raise ValueError(f"the sampler needs a key-value cache in every layer; the model has {sorted(unsupported)}")
        self.policy_version = 0
        self.shares_weights = shares_weights
        self._model = model
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._max_context_tokens = max_context_tokens
        self._max_rows = max_rows
        self._dtype = dtype
        self._speculator = speculator
        self._lengths = lengths
        self._token_texts: dict[int, str] = {}
        self._metrics = SamplerMetrics()
        was_training = model.training
        model.train(False)
        self._forward = Forward(model, max_context_tokens)
        self._shared = shared_rows_are_exact(self._forward)
        model.train(was_training)

    # ------------------------------------------------------------ protocol
    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order; greedy at temperature 0, with log-probabilities at temperature 1.

        Raises DataError for a prompt that is empty or leaves no room for one token, NonFinite when the model gives NaN.
        """
        for request in requests:
            self._check_prompt(request)
        if not requests:
            return []
        was_training = self._model.training
        self._model.train(False)
        try:
            with torch.inference_mode(), self._autocast():
                decoding = self._decoding(requests, sampling)
                decoding.run()
        finally:
            self._model.train(was_training)
        sampled = decoding.record.finish()
        self._metrics.add(decoding)
        if self._lengths is not None and sampling.temperature > 0:
            prompts = [request.prompt_ids for request in requests]
            self._lengths.learn(prompts, [len(each.token_ids) for each in sampled])
        return self._completions(sampled, decoding.stopped_N.tolist())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy full weights into the module; tensors that already are the module's own are left as they are.

        With `shares_weights` nothing is read from `weights`. Raises ValueError for a name the model lacks, a wrong
        shape, or a parameter that was not given.
        """
        if not self.shares_weights:
            self._copy(weights)
        self.policy_version = policy_version

    def take_metrics(self) -> dict[str, float]:
        """How full the batch was, and what drafts did."""
        drafted = {} if self._speculator is None else self._speculator.take_metrics()
        return self._metrics.take() | drafted

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
    def _decoding(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> Decoding:
        embeddings: Any = self._model.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        is_end_V = np.zeros(vocabulary, dtype=np.bool_)
        is_end_V[[token for token in self._end_token_ids if token < vocabulary]] = True
        longest = None if self._lengths is None else self._lengths.straggler_tokens
        limits = Limits(self._max_rows, self._max_context_tokens, is_end_V, longest)
        stop_texts = StopTexts(self._tokenizer, sampling.stop) if sampling.stop else None
        waiting = Waiting(requests, self._lengths)
        rows = open_rows(self._forward, shared=self._shared, room_tokens=min(sampling.max_new_tokens, ROOM_TOKENS))
        return Decoding(rows, requests, sampling, limits, waiting, stop_texts, self._forward.device, self._speculator)

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
        return torch.autocast(self._forward.device.type, dtype=torch.bfloat16, enabled=self._dtype == "bfloat16")

    # ------------------------------------------------------------ records
    def _completions(self, sampled: Sequence[Sampled], stopped: Sequence[bool]) -> list[Completion]:
        return [self._completion(each, stop) for each, stop in zip(sampled, stopped, strict=True)]

    def _completion(self, sampled: Sampled, stopped: bool) -> Completion:
        tokens = sampled.token_ids
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(
            token_ids=tokens,
            text=self._text(tokens[:-1] if tokens[-1] in self._end_token_ids else tokens),
            finish_reason=reason,
            logprobs=sampled.logprobs,
            full_logprobs=sampled.full_logprobs,
            token_texts=[self._token_text(token) for token in tokens],
            kept_ids=sampled.kept_ids,
            policy_version=self.policy_version,
        )

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self._text([token])
        return self._token_texts[token]

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


class SamplerMetrics:
    """Counts between two calls of `take_metrics`."""

    def __init__(self) -> None:
        self._row_steps = self._live_steps = self._stragglers = 0

    def add(self, decoding: Decoding) -> None:
        """One call of `sample`."""
        self._row_steps += decoding.num_row_steps
        self._live_steps += decoding.num_live_steps
        self._stragglers += decoding.num_stragglers

    def take(self) -> dict[str, float]:
        """By names of the metric catalogue; empty when nothing was decoded."""
        if self._row_steps == 0:
            return {}
        values = {
            "rollout/slot_use_share": self._live_steps / self._row_steps,
            "rollout/straggler_rows": float(self._stragglers),
        }
        self._row_steps = self._live_steps = self._stragglers = 0
        return values
