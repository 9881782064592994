"""Faults of vLLM 0.32.0 on the CPU, mended in the process that samples.

1. Speculation under temperature: the per-token copies of temperature, top-k and top-p are made by a kernel that writes
   into a copy of its output (`cpu_triton_utils._expand_kernel_impl`), so they stay uninitialised memory: sampling
   crashes under top-k and silently follows another distribution without.
2. Speculation under top-k: a step in which no request has a draft takes the maximum of an empty tensor.
3. Tied models: the output head is packed when the model is loaded. An update without `lm_head.weight`, which
   checkpoints and parameters of tied models do not have, loads the embedding and leaves the old packed head.
4. A prompt computed in parts (more than a step takes at once, or resumed beside others): each part samples a token that
   is thrown away, and the draw is taken back by an offset that generators of the CPU do not have. Every request of ours
   has a seed, so the first such step ended the engine: "CPU Generator does not use offset".
5. The start of an engine looks at every attribute of every module for kernels to replace, and takes whatever an object
   gives as its `__dict__` for one. llvmlite's library, which numba brings and with it n-gram speculation, gives a
   function: "'_lib_fn_wrapper' object has no attribute 'get'", for a second engine in a process, or a first one where
   numba was used before.

The first two go to vLLM's module at once and the fourth to its model runner (`mend_sampling`), the third follows each
update (`pack_heads`), the fifth comes before a start (`mend_start`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_truncate = rejection_sampler.apply_top_k_top_p
_sample_tokens = GPUModelRunner.sample_tokens


def mend_sampling() -> None:
    """Replace what is broken in sampling on the CPU, whose model runner inherits this; elsewhere nothing. May be called
    again."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expanded
        rejection_sampler.apply_top_k_top_p = truncated
        GPUModelRunner.sample_tokens = sample_whole_prompts


def mend_start() -> None:
    """For engines in this process. May be called again."""
    dispatcher.vars = attributes  # in place of Python's own, in that module alone


def attributes(value: object) -> Mapping[str, object]:
    """What `vars` says, where that is a mapping."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


def expanded(
    values_B: Tensor, ends_B: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """[num_tokens]: each request's value once for each of its drafted tokens, `replace_from` as `replace_to`.

    `ends_B` are the running sums of the requests' numbers of drafts."""
    counts_B = torch.diff(ends_B.long(), prepend=ends_B.new_zeros(1).long())
    replaced_B = torch.where(values_B == replace_from, torch.full_like(values_B, replace_to), values_B)
    return replaced_B.repeat_interleave(counts_B, output_size=num_tokens)


def truncated(logits_NV: Tensor, top_k_N: Tensor | None, top_p_N: Tensor | None) -> Tensor:
    """vLLM's own truncation, for N = 0 as well."""
    kept: Tensor = logits_NV if logits_NV.shape[0] == 0 else _truncate(logits_NV, top_k_N, top_p_N)
    return kept


def sample_whole_prompts(runner: Any, grammar_output: Any) -> Any:
    """vLLM's own step of sampling, with the generators of requests whose prompt goes on out of its reach.

    Nothing is drawn from them, so nothing has to be taken back; the token to be dropped comes from the process's."""
    batch = runner.input_batch
    unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    withheld = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
    try:
        return _sample_tokens(runner, grammar_output)
    finally:
        batch.generators.update(withheld)


def tied_heads(model: nn.Module) -> list[nn.Module]:
    """Output heads that share the weight of an embedding."""
    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    return [head for head in heads if any(head.weight is layer.weight for layer in layers if layer is not head)]


def pack_heads(heads: Sequence[nn.Module]) -> None:
    """Pack the heads' present weights on the CPU; elsewhere they are used as they are."""
    if current_platform.is_cpu():
        for head in heads:
            method: Any = head.quant_method
            method.process_weights_after_loading(head)
