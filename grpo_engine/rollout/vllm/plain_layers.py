"""Whether vLLM's model is so plain that new weights may be copied into it where it stands (`in_place`).

Plain is a layer whose weight loaders copy into its parameters as they are now, and of which vLLM makes nothing else
after loading but a packed copy for multiplication on the CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def obstacle(model: nn.Module) -> str | None:
    """What of the model, loaded whole by now, would not be right after an update in place; None = nothing."""
    if callable(getattr(model, "process_weights_after_loading", None)):
        return f"{type(model).__name__} prepares its weights after loading"
    for name, layer in model.named_modules():
        reason = _prepares(layer) or _rebuilt(layer)
        if reason is not None:
            return f"{name or type(layer).__name__} {reason}"
    return None


def _prepares(layer: nn.Module) -> str | None:
    """What vLLM does to the layer's weights after loading, beyond packing them for the CPU."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and type(method) not in PLAIN_METHODS:
        return f"is prepared by {type(method).__name__}"
    if not callable(getattr(layer, "process_weights_after_loading", None)):
        return None
    if is_deferred_attention_layer(layer) and not any(True for _ in layer.parameters(recurse=False)):
        own: Any = type(layer)
        backend: Any = type(layer.impl)
        sets_scales = own.process_weights_after_loading is Attention.process_weights_after_loading
        # Without quantisation the scales are 1, before an update and after it.
        if sets_scales and backend.process_weights_after_loading is AttentionImplBase.process_weights_after_loading:
            return None
    return f"prepares its weights after loading ({type(layer).__name__})"


def _rebuilt(layer: nn.Module) -> str | None:
    """Which of the layer's tensors no longer is what the weight loaders were made for, packed parameters aside."""
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    live = {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}
    live_buffers = {name: tensor for name, tensor in layer._buffers.items() if tensor is not None}
    # vLLM does not record biases: they are made behind the weights, and loaded where they are.
    if live.keys() - {"bias"} != parameters.keys() - {"bias"} or live_buffers.keys() != buffers.keys():
        return "has other tensors than before loading"
    for name, recorded in (*parameters.items(), *buffers.items()):
        tensor = live.get(name, live_buffers.get(name))
        if tensor is None or not (_same_layout(tensor, recorded) or _is_packed(layer, name, tensor, recorded)):
            return f"has another {name} than before loading"
    method_packs_in_place = current_platform.is_cpu() and type(getattr(layer, "quant_method", None)) in PLAIN_METHODS
    if method_packs_in_place and any(recorded.ndim != 2 for recorded in parameters.values()):
        return "has weights that are no matrix"
    if any(tensor.device.type != current_platform.device_type for tensor in live.values()):
        return "has weights on another device"
    return None


def _same_layout(tensor: Tensor, recorded: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.stride()) == (recorded.shape, recorded.dtype, recorded.stride())


def _is_packed(layer: nn.Module, name: str, tensor: Tensor, recorded: Tensor) -> bool:
    """The CPU's packed weights: the linear method keeps them in a closure and leaves an empty parameter."""
    method = type(getattr(layer, "quant_method", None))
    packs = current_platform.is_cpu() and method is UnquantizedLinearMethod and name == "weight"
    return packs and tensor.numel() == 0 and recorded.ndim == 2
