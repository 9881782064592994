"""Which part of which parameter each named weight goes to, learned from vLLM's own loaders.

The loaders run once more on tensors without memory (the meta device) while every operation is watched. A model of which
only views and copies are seen does nothing with a weight but to put it somewhere, and always the same: later updates
repeat the copies alone. Of any other model nothing is learned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from grpo_engine.rollout.vllm.slots import Loader, Place, Slot, opened, place_of

Given = tuple[torch.Size, torch.dtype]
"""Shape and type of a weight."""


@dataclass(slots=True)
class Way:
    """Where the weight of one name goes; nowhere where another name brings the same."""

    shape: torch.Size
    moves: list[tuple[Slot, Place, Place]] = field(default_factory=list)
    """(parameter, part of it, part of the weight that is copied there)."""

    def fits(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and tensor.is_contiguous()

    def follow(self, tensor: Tensor, *, is_new: bool) -> None:
        """What comes a second time in an update is not new: it fills nothing that was missing."""
        start = tensor.storage_offset()
        for slot, to, (size, stride, offset) in self.moves:
            slot.fill(to, tensor.as_strided(size, stride, start + offset), is_new=is_new)


class _Unlearned(Exception):
    """The model does more with a weight than to put it somewhere."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies, lets views and constants pass, and raises _Unlearned for everything else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        elif not func.is_view and func is not torch.ops.aten.fill_.Scalar:
            raise _Unlearned(f"{func} of a weight")
        return func(*args, **(kwargs or {}))


def learn(model: Any, slots: Sequence[Slot], given: Mapping[str, Given]) -> dict[str, Way] | str:
    """The ways of the weights `given`, which were all that the model needs; or why there are none."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in given.items()}
    names = {_storage(tensor): name for name, tensor in tensors.items()}
    ways = {name: Way(shape) for name, (shape, _) in given.items()}
    twins = {id(slot): slot.unpacked if slot.unpacked is not None else _twin(slot.parameter) for slot in slots}
    brought: dict[int, int] = defaultdict(int)

    def watched(slot: Slot) -> Loader:
        def load(param: Any, *args: Any, **kwargs: Any) -> Any:
            twin, first = twins[id(slot)], len(watch.copies)
            result = slot.loader(twin, *args, **kwargs)
            for to, source in watch.copies[first:]:
                if _storage(to) != _storage(twin) or _storage(source) not in names:
                    raise _Unlearned("a copy from or to elsewhere")
                ways[names[_storage(source)]].moves.append((slot, place_of(to), place_of(source)))
                brought[id(slot)] += to.numel()
            return result

        return load

    try:
        with opened(slots, watched), _Watch() as watch:
            model.load_weights(iter(tensors.items()))
    except Exception as error:  # whatever a model says to tensors without memory
        return f"{type(error).__name__}: {error}"
    copied = sum(len(way.moves) for way in ways.values())
    if copied != len(watch.copies) or any(brought[id(slot)] < slot.needed for slot in slots):
        return "some copies are not made by a parameter's loader"
    if any(slot.unpacked is not None and brought[id(slot)] != slot.needed for slot in slots):
        return "some weights come twice"
    return ways


def _twin(parameter: nn.Parameter) -> Any:
    return to_meta_tensor(parameter)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
