"""The parameters of vLLM's model as an update fills them: one `Slot` each, and the heads that are packed afterwards.

On the CPU a linear layer's weight is packed away (`process_weights_after_loading`) and its parameter left empty: such a
slot makes the parameter anew, and packs it when it is whole. Small ones are not packed any more: packing takes longer
than their copy, and buys nothing. Every other parameter stays where it is, so that tied layers and CUDA graphs see the
new weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter, materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

Loader = Callable[..., Any]
"""What vLLM's models call with a parameter, a tensor and perhaps the name of a part (q, k, v)."""
SMALL_ELEMENTS = 1 << 16
"""Float32 matrices below are multiplied by torch's own linear as fast as packed ones by vLLM's: measured for 1 to 512
rows, 40 % faster for one row, 4 us slower at most."""
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and offset of a view."""


def place_of(view: Tensor) -> Place:
    return tuple(view.size()), tuple(view.stride()), int(view.storage_offset())


@dataclass(slots=True)
class Slot:
    """One parameter."""

    layer_name: str
    layer: Any
    name: str
    parameter: Any
    """What the layer has between updates."""
    unpacked: Any
    """On the meta device, what the loader was made for, where the layer's own is packed away; else None."""
    loader: Loader
    has_loader: bool
    """Whether `loader` is the parameter's own; else it is vLLM's default."""
    needed: int
    """Elements that an update has to bring."""
    loaded: int = 0
    filling: Any = None
    """An unpacked parameter that is not whole yet."""

    def begin(self) -> None:
        self.loaded, self.filling = 0, None

    @property
    def is_whole(self) -> bool:
        return self.loaded >= self.needed

    # ------------------------------------------------------------ by vLLM's loader
    def open(self, loader: Loader) -> None:
        """Until `close` vLLM's models find `loader` where they look for this parameter's."""
        whole = self.parameter if self.unpacked is None else self.unpacked
        whole.weight_loader = loader
        self.layer.register_parameter(self.name, whole)

    def close(self) -> None:
        self.layer.register_parameter(self.name, self.parameter)
        if self.unpacked is not None:
            return
        if self.has_loader:
            self.parameter.weight_loader = self.loader
        else:
            del self.parameter.weight_loader

    def load(self, param: Any, *args: Any, **kwargs: Any) -> Any:
        """As `loader`, and count what it copies as vLLM does."""
        if self.unpacked is not None and self.is_whole:
            return None  # as vLLM does with what comes a second time
        target = self._target()
        with CopyCounter() as counter:
            result = self.loader(target, *args, **kwargs)
        self._count(min(counter.copied_numel, get_tensor_load_numel(target)))
        return result

    # ------------------------------------------------------------ by a known way
    def fill(self, to: Place, source: Tensor, *, is_new: bool) -> None:
        """Copy `source` into that part of the parameter."""
        if self.unpacked is not None and self.is_whole:
            return
        target = self._target()
        size, stride, offset = to
        target.as_strided(size, stride, target.storage_offset() + offset).copy_(source)
        self._count(source.numel() if is_new else 0)

    # ------------------------------------------------------------ packed ones
    def _target(self) -> Any:
        if self.unpacked is None:
            return self.parameter
        if self.filling is None:
            self.filling = materialize_meta_tensor(self.unpacked)
        return self.filling

    def _count(self, num_elements: int) -> None:
        self.loaded += num_elements
        if self.filling is not None and self.is_whole:
            self._pack(self.filling)

    def _pack(self, whole: Any) -> None:
        held = self.layer._parameters[self.name]
        self.layer.register_parameter(self.name, whole)
        self.layer.quant_method.process_weights_after_loading(self.layer)
        if self.layer._parameters[self.name] is whole:  # not packed: from now on one that stays where it is
            self.parameter, self.unpacked = whole, None
        else:
            self.layer.register_parameter(self.name, held)
        self.filling = None


@contextmanager
def opened(slots: Iterable[Slot], loader_of: Callable[[Slot], Loader]) -> Iterator[None]:
    """The model with those loaders, and with the parameters that are packed away otherwise."""
    for slot in slots:
        slot.open(loader_of(slot))
    try:
        yield
    finally:
        for slot in slots:
            slot.close()


def slots_of(model: nn.Module) -> list[Slot]:
    """Every parameter once, tied ones under the first layer that has them."""
    found: dict[int, Slot] = {}
    for layer_name, layer in model.named_modules():
        recorded, _ = get_layerwise_info(layer).restore_metadata
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in found:
                found[id(parameter)] = _slot(layer_name, layer, name, parameter, recorded.get(name))
    return list(found.values())


def _slot(layer_name: str, layer: nn.Module, name: str, parameter: Any, recorded: Tensor | None) -> Slot:
    unpacked = None
    if recorded is not None and parameter.shape != recorded.shape:
        unpacked = restore_layer_refs(to_meta_tensor(recorded), layer)
    whole = parameter if unpacked is None else unpacked
    loader = getattr(whole, "weight_loader", None)
    needed = get_tensor_load_numel(whole)
    if isinstance(layer, VocabParallelEmbedding):
        needed = min(1, needed)  # a vocabulary is padded inside vLLM: some of it is never loaded
    return Slot(
        layer_name, layer, name, parameter, unpacked, loader or default_weight_loader, loader is not None, needed
    )  # fmt: skip


def leave_small_unpacked(slots: Iterable[Slot]) -> None:
    """The flag is vLLM's own, for layers where packing does not pay."""
    for slot in slots:
        if slot.unpacked is not None and _is_small(slot.unpacked):
            slot.layer._cpu_skip_gemm_dispatch = True


def vocabularies_of(model: nn.Module, *, leave_small: bool) -> tuple[list[Any], list[Any]]:
    """The layers whose weight the CPU keeps and packs as well, apart: those to be packed, and those that need not be.

    It packs all of them. Only output heads are multiplied by, and of these not the small ones with `leave_small`."""
    places = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
    vocabularies: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in vocabularies if isinstance(layer, ParallelLMHead) or places[id(layer)] > 1]
    packed = [layer for layer in heads or vocabularies if not (leave_small and _is_small(layer.weight))]
    return packed, [layer for layer in vocabularies if layer not in packed]


def _is_small(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() < SMALL_ELEMENTS
