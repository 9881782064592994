"""Log-probabilities of given completions under a causal language model, shared by learner, reference and critic.

Only hidden states that predict a completion token reach the output head, in chunks (model/vocabulary.py), so the
[B, T, V] logits never exist. Where the model allows it, rows are packed and nothing is computed for padding
(model/packing.py, model/attention.py).

Log-softmax runs in float32 (float64 in a float64 model) whatever the compute type, on logits / temperature: a policy
that was sampled at temperature 0.7 must be trained at 0.7, or the ratio of an untouched policy is not 1 (TRL issue
3029). With kept ids the policy's log-probability is renormalised over exactly the kept set (TRL issue 6789: without it
every ratio is off by the kept mass); KL and entropy use the full distribution.

Supported: every Hugging Face causal model. Where logits are exactly head(last hidden state) the head runs alone;
models that scale or cap their final logits (Gemma 2, Cohere, Granite) are recognised by a probe and take a full padded
forward with `logits_to_keep`, which costs the memory of the completion's logits once. Mixture-of-experts load balancing
losses and dropout are not part of this forward.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.model.attention import (
    LAYOUT_ARGUMENT,
    PackedLayout,
    has_packed_attention,
    use_packed_attention,
    use_plain_attention,
)
from grpo_engine.model.memory_limit import is_out_of_memory
from grpo_engine.model.packing import TokenBatch, collate
from grpo_engine.model.vocabulary import Scores, Scoring, score_hidden, score_logits
from grpo_engine.types import TrainRow

log = logging.getLogger("cohort")
CHUNK_ELEMENTS = 2**24
"""Logits alive at once: 64 MiB in float32."""
PROBE_TOLERANCE = 1e-4
"""Largest difference of packed and padded hidden states, relative to the largest of them; wrong attention is far
off."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model says of each completion token; all [N], float32 nats unless the model is float64."""

    policy: Tensor
    """Under the distribution that was sampled from: renormalised over the kept ids when there are any."""
    full: Tensor
    """Under the untruncated distribution at the same temperature."""
    entropy: Tensor
    """Of the full distribution; carries a gradient only when that was asked for."""
    correct: Tensor
    """bool: no token is likelier."""
    features: Tensor | None = None
    """[N, H] hidden states that predict the tokens, with gradient; None where the model's logits are not
    head(hidden state)."""


class LogprobForward:
    """One forward pass of a model over a TokenBatch. Puts the model into eval mode: dropout would break ratio = 1.

    `packed` says which batches it is best given (`collate(..., packed=forward.packed)`); padded ones work always. None
    lets a probe decide: packed where a tiny batch gives the hidden states of the padded forward, else padded."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: str = "float32",
        chunk_elements: int = CHUNK_ELEMENTS,
        packed: bool | None = None,
    ) -> None:
        """Raises ValueError when `packed` is asked of a model that cannot."""
        self.model = model
        model.train(False)
        self.device = model.device
        self._autocast_bfloat16 = dtype == "bfloat16"
        self.head_is_separate = head_is_separate(model)
        self._chunk_rows = max(1, chunk_elements // _head(model).weight.shape[0])
        able = packed is not False and self.head_is_separate and packing_is_exact(model)
        if packed and not able:
            raise ValueError(f"{type(model).__name__} cannot compute packed rows exactly; use packed=None")
        if packed is None and not able:
            log.info("%s cannot compute packed rows exactly: rows are padded, which is slower", type(model).__name__)
        self.packed = able

    def features(self, batch: TokenBatch) -> Tensor:
        """[N, H] hidden states that predict the completion tokens."""
        if batch.target_N.shape[0] == 0:
            return self._nothing()
        with self._autocast():
            hidden: Tensor = self.model.base_model(**_inputs(batch), use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, batch.feature_index)

    def __call__(self, batch: TokenBatch, temperature: float, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """Raises ValueError unless temperature > 0."""
        if not temperature > 0:
            raise ValueError(f"temperature {temperature} must be above 0: log-probabilities of greedy choice are all 0")
        how = Scoring(temperature, self._chunk_rows, entropy_gradient)
        if batch.target_N.shape[0] == 0:
            nothing = self._nothing()[:, 0]
            return TokenLogprobs(nothing, nothing, nothing, nothing.bool())
        if not self.head_is_separate:
            return TokenLogprobs(*self._score_logits(batch, how))
        features_NH = self.features(batch)
        with self._autocast():
            scores = score_hidden(_head(self.model), features_NH, batch.target_N, batch.kept_ids, how)
        return TokenLogprobs(*scores, features=features_NH)

    def _score_logits(self, batch: TokenBatch, how: Scoring) -> Scores:
        arguments, first = _inputs(batch), 0
        width = batch.input_ids.shape[1]
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            first = batch.first_position
            arguments["logits_to_keep"] = width - first
        with self._autocast():
            logits_BKV = self.model(**arguments, use_cache=False).logits
            row_N = batch.feature_index // width
            index_N = batch.feature_index - first * (row_N + 1)
            logits_NV = logits_BKV.flatten(0, 1).index_select(0, index_N)
            return score_logits(logits_NV, batch.target_N, batch.kept_ids, how)

    def _nothing(self) -> Tensor:
        weight = _head(self.model).weight
        return torch.zeros(0, weight.shape[1], dtype=weight.dtype, device=self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast_bfloat16)


def _inputs(batch: TokenBatch) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.layout is None:
        return arguments | {"attention_mask": batch.attention_mask}
    # A mask of four dimensions is taken as it is: none is built. The attention function never looks at it.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
    arguments |= {"attention_mask": mask, "position_ids": batch.position_ids}
    return arguments | {LAYOUT_ARGUMENT: batch.layout}


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


@torch.no_grad()
def head_is_separate(model: PreTrainedModel) -> bool:
    """True when the model's logits are, bit for bit, its output embeddings applied to the last hidden state."""
    head, base = _head(model), model.base_model
    if head is None or base is model:
        return False
    ids = torch.arange(4, device=model.device)[None] % head.weight.shape[0]
    alone = head(base(input_ids=ids, use_cache=False).last_hidden_state)
    whole = model(input_ids=ids, use_cache=False).logits
    # All-zero logits would hide a scale or a cap.
    return bool(alone.any()) and torch.equal(alone, whole)


@torch.no_grad()
def packing_is_exact(model: PreTrainedModel) -> bool:
    """Set packed attention on the model and compare packed with padded hidden states of a ragged batch; where they
    differ, or the model refuses, its attention is restored and the answer is False. What an earlier call had set stays:
    somebody computes packed rows with it.

    Windows are wider than the batch, so a model must also be seen to pass its window on to the attention function."""
    was_set, exact = has_packed_attention(model), False
    if not use_packed_attention(model):
        return False
    try:
        exact = _packed_equals_padded(model)
    except Exception as error:  # models that build masks or biases of their own raise whatever they like
        if is_out_of_memory(error):
            raise
        log.debug("packed attention", exc_info=True)
    finally:
        if not exact and not was_set:
            use_plain_attention(model)
    return exact


def _packed_equals_padded(model: PreTrainedModel) -> bool:
    vocabulary = _head(model).weight.shape[0]
    rows = [
        TrainRow([token % vocabulary for token in prompt], [token % vocabulary for token in completion])
        for prompt, completion in (([5, 3, 7], [2, 9, 4, 6]), ([8], [3, 1]), ([5, 3, 7], [11, 2, 8]))
    ]
    hidden = []
    for packed in (False, True):
        batch = collate(rows, device=model.device, packed=packed)
        states = model.base_model(**_inputs(batch), use_cache=False).last_hidden_state
        hidden.append(states.flatten(0, 1).index_select(0, batch.feature_index))
    scale = float(hidden[0].abs().max())
    tolerance = PROBE_TOLERANCE * scale
    close = bool(((hidden[0] - hidden[1]).abs() <= tolerance).all())
    return close and batch.layout is not None and _windows_are_known(model, batch.layout)


def _windows_are_known(model: PreTrainedModel, layout: PackedLayout) -> bool:
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    if kinds - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return False
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    return window is None or window in layout.windows
