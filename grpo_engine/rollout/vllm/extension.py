"""What runs inside vLLM's worker, in this process or in a server's: vLLM imports `CohortWorker` by its name
(`options.EXTENSION`) before it makes a model.

Three things come with the import: kept tokens beside each sampled one (`widening`), our weight transfer backend for
vLLM's RL API, and the repairs of `cpu_fixes`. They rely on the insides of vLLM's first model runner, so other releases
than the one they were written for are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import vllm
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.cpu_fixes import mend_sampling, pack_heads, tied_heads
from grpo_engine.rollout.vllm.options import WEIGHT_BACKEND
from grpo_engine.rollout.vllm.widening import top_logprobs, widened

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

    def init_transfer_engine(self, init_info: CohortInit) -> None:
        return

    def start_weight_update(self) -> None:
        self._tied = tied_heads(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: CohortUpdate) -> None:
        weights = update_info.weights if update_info.weights is not None else _read(update_info.path)
        try:
            self.model.load_weights(weights)
        except BaseException:
            # Else the next update would count the tensors that this one left behind.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        absent = _absent(self.model, self._tied)
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self._tied)
        if absent:
            raise ValueError(f"the update lacks weights of {len(absent)} layers, {absent[0]} among them")

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
        if not info.can_load() or not info.load_numel_total or layer in tied:
            continue
        if info.load_numel < (1 if isinstance(layer, VocabParallelEmbedding) else info.load_numel_total):
            absent.append(name)
    return absent


# ---------------------------------------------------------------- log-probabilities
def _widen_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sampler.forward that widens where all log-probabilities are asked for, which is how we ask for kept tokens."""

    @wraps(original)
    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if not _asks_for_kept(sampling_metadata, logits):
            return original(self, logits, sampling_metadata, *args, **kwargs)
        # Before: the original divides and masks its logits in place.
        top_B = _top(logits, sampling_metadata.temperature)
        everything = replace(sampling_metadata, max_num_logprobs=-1)
        output = original(self, logits, everything, *args, **kwargs)
        sampled_B = output.sampled_token_ids[:, 0].long()
        return replace(output, logprobs_tensors=_tensors(output.logprobs_tensors.logprobs, top_B, sampled_B))

    return forward


def _widen_rejection_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    """RejectionSampler.forward, likewise; N = drafted tokens and one more a request."""

    @wraps(original)
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        if not _asks_for_kept(sampling_metadata, logits):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        counts_B = torch.tensor([count + 1 for count in metadata.num_draft_tokens], device=logits.device)
        temperature_B = sampling_metadata.temperature
        temperature_N = None if temperature_B is None else temperature_B.repeat_interleave(counts_B)
        top_N = _top(logits, temperature_N)
        first_B1 = (counts_B.cumsum(0) - counts_B)[:, None]
        position_Q = torch.arange(metadata.max_spec_len + 1, device=logits.device)
        index = (first_B1 + position_Q).flatten().clamp(max=len(top_N) - 1)

        def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
            return _tensors(logprobs, top_N[index], token_ids)

        self.sampler.gather_logprobs = gather
        try:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            del self.sampler.gather_logprobs

    return forward


def _asks_for_kept(sampling_metadata: Any, logits: Tensor) -> bool:
    return (sampling_metadata.max_num_logprobs or 0) >= logits.shape[-1]


def _top(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    if temperature_B is None:  # every request is greedy
        temperature_B = logits_BV.new_ones(len(logits_BV))
    return top_logprobs(logits_BV, temperature_B)


def _tensors(logprobs_BV: Tensor, top_B: Tensor, sampled_B: Tensor) -> LogprobsTensors:
    ids_BW, values_BW = widened(logprobs_BV, top_B, sampled_B)
    return LogprobsTensors(ids_BW, values_BW, torch.zeros_like(ids_BW[:, 0]))


# ---------------------------------------------------------------- at import
def _install() -> None:
    if not vllm.__version__.startswith(RELEASE):
        raise RolloutUnavailable(
            f"vLLM {vllm.__version__} is installed; this release of Cohort works with {RELEASE}x: run make install-vllm"
        )
    mend_sampling()
    Sampler.forward = _widen_sampler(Sampler.forward)
    RejectionSampler.forward = _widen_rejection_sampler(RejectionSampler.forward)
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, CohortWeights)


_install()
