"""What runs inside vLLM's worker, in this process or in a server's: vLLM imports `CohortWorker` by its name
(`options.EXTENSION`) before it makes a model.

Three things come with the import: kept tokens beside each sampled one (`widening`), our weight transfer backend for
vLLM's RL API, and the repairs of `cpu_fixes`. They rely on the insides of vLLM's first model runner, so other releases
than the one they were written for are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import vllm
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.cpu_fixes import mend_sampling, pack_heads, tied_heads
from grpo_engine.rollout.vllm.in_place import InPlace
from grpo_engine.rollout.vllm.options import WEIGHT_BACKEND
from grpo_engine.rollout.vllm.plain_layers import obstacle
from grpo_engine.rollout.vllm.widening import top_logprobs, widened

log = logging.getLogger("cohort")

RELEASE = "0.32."


class CohortWorker:
    """Mixed into vLLM's worker."""


# ---------------------------------------------------------------- weights
@dataclass
class CohortInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed upon."""


@dataclass
class CohortUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Full weights under the names of the Hugging Face model."""

    path: str = ""
    """A safetensors file that the server can read."""
    weights: Iterable[tuple[str, Tensor]] | None = None
    """The tensors themselves, within one process."""


class CohortWeights(WeightTransferEngine[CohortInit, CohortUpdate]):  # type: ignore[misc]
    """An incomplete update raises ValueError; after a failed one the weights are undefined until the next."""

    init_info_cls = CohortInit
    update_info_cls = CohortUpdate
    supports_draft_weight_update = False

    in_place: InPlace | None = None
    """How updates are made; None = by vLLM's own reload."""
    _is_planned = False

    def init_transfer_engine(self, init_info: CohortInit) -> None:
        """Decide how updates are made. Servers are told so before each of them."""
        if self._is_planned:
            return
        self._is_planned = True
        reason = obstacle(self.model)
        if reason is None:
            is_eager = self.vllm_config.compilation_config.mode == CompilationMode.NONE
            self.in_place = InPlace(self.model, is_eager=is_eager)
        else:
            log.info("vLLM takes new weights by its own reload, which is slower: %s", reason)

    def start_weight_update(self) -> None:
        if self.in_place is None:
            self._tied = tied_heads(self.model)
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: CohortUpdate) -> None:
        weights = update_info.weights if update_info.weights is not None else _read(update_info.path)
        if self.in_place is not None:
            self.in_place.load(weights)
            return
        try:
            self.model.load_weights(weights)
            absent = _absent(self.model, self._tied)
            if absent:
                raise ValueError(f"the update lacks weights of {len(absent)} layers, {absent[0]} among them")
        except BaseException:
            # Else the next update would count the tensors that this one left behind, and vLLM load a refused one again.
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights, info.load_numel = [], 0
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        if self.in_place is None:
            # vLLM warns "ParallelLMHead: Failed to load weights" of a tied head, which no update names, and puts the
            # old one back; packing makes it the embedding's.
            finalize_layerwise_reload(self.model, self.model_config)
            pack_heads(self._tied)

    def shutdown(self) -> None:
        return


def _read(path: str) -> Iterable[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            yield name, file.get_tensor(name)


def _absent(model: nn.Module, tied: Sequence[nn.Module]) -> list[str]:
    """Layers that were not loaded whole. A vocabulary is padded inside vLLM: some of it is never loaded."""
    absent = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or layer in tied or is_deferred_attention_layer(layer):
            continue  # loaded whole; follows another layer; has no weights but perhaps scales
        num_elements = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if info.load_numel < (min(1, num_elements) if isinstance(layer, VocabParallelEmbedding) else num_elements):
            absent.append(name)
    return absent


# ---------------------------------------------------------------- log-probabilities
def _own_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sampler.forward with our entries beside each token, where a step's requests are ours alone."""

    @wraps(original)
    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        # Before: the original divides and masks its logits in place.
        entries = _entries(logits, sampling_metadata, sampling_metadata.temperature)
        if entries is None:
            return original(self, logits, sampling_metadata, *args, **kwargs)
        everything = replace(sampling_metadata, max_num_logprobs=-1)
        output = original(self, logits, everything, *args, **kwargs)
        sampled_B = output.sampled_token_ids[:, 0].long()
        return replace(output, logprobs_tensors=entries(output.logprobs_tensors.logprobs, sampled_B))

    return forward


def _own_rejection_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    """RejectionSampler.forward, likewise. It scores B x Q places, Q = the longest draft and one more; those behind a
    request's own are of others and are dropped by vLLM."""

    @wraps(original)
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        counts_B = torch.tensor([count + 1 for count in metadata.num_draft_tokens], device=logits.device)
        temperature_N = sampling_metadata.temperature
        if temperature_N is not None:
            temperature_N = temperature_N.repeat_interleave(counts_B, output_size=len(logits))
        places_BQ = (counts_B.cumsum(0) - counts_B)[:, None] + torch.arange(
            metadata.max_spec_len + 1, device=logits.device
        )
        index = places_BQ.flatten().clamp(max=len(logits) - 1)
        entries = _entries(logits, sampling_metadata, temperature_N, index)
        if entries is None:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        self.sampler.gather_logprobs = lambda logprobs, num_logprobs, token_ids: entries(logprobs, token_ids)
        try:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            del self.sampler.gather_logprobs

    return forward


Entries = Callable[[Tensor, Tensor], LogprobsTensors]


def _entries(
    logits: Tensor, sampling_metadata: Any, temperature: Tensor | None, index: Tensor | None = None
) -> Entries | None:
    """From log-probabilities [B, V] and sampled tokens [B] to what is returned; None where somebody else asks.

    We ask for 0 entries (the sampled token's own, without vLLM's count of likelier ones) or for all, which is how we
    ask for the kept tokens. `index` says which rows of the logits are scored."""
    num_logprobs = sampling_metadata.max_num_logprobs
    if num_logprobs is None or sampling_metadata.logprob_token_ids:
        return None
    if num_logprobs == 0:
        return lambda logprobs, sampled: _tensors(sampled[:, None].int(), logprobs.gather(1, sampled[:, None]))
    if num_logprobs < logits.shape[-1]:
        return None
    top = top_logprobs(logits, logits.new_ones(len(logits)) if temperature is None else temperature)
    if index is not None:
        top = top[index]
    return lambda logprobs, sampled: _tensors(*widened(logprobs, top, sampled))


def _tensors(ids_BW: Tensor, values_BW: Tensor) -> LogprobsTensors:
    return LogprobsTensors(ids_BW, values_BW, torch.zeros_like(ids_BW[:, 0]))


# ---------------------------------------------------------------- at import
def _install() -> None:
    if not vllm.__version__.startswith(RELEASE):
        raise RolloutUnavailable(
            f"vLLM {vllm.__version__} is installed; this release of Cohort works with {RELEASE}x: run make install-vllm"
        )
    mend_sampling()
    Sampler.forward = _own_sampler(Sampler.forward)
    RejectionSampler.forward = _own_rejection_sampler(RejectionSampler.forward)
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, CohortWeights)


_install()
