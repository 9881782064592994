"""Weight updates straight into vLLM's model, where it is plain enough for that (`plain_layers.obstacle`).

vLLM's own way (`model_loader.reload`) takes every layer apart onto the meta device, loads each weight twice and puts
the layer together again, whatever the layer is. Here the first update goes through vLLM's weight loaders into the
parameters where they are (`slots`), and from it is learned where each weight goes (`moves`), so that the others are
copies. What is packed for the CPU is packed by vLLM's own method.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from grpo_engine.rollout.vllm.moves import Given, Way, learn
from grpo_engine.rollout.vllm.slots import leave_small_unpacked, opened, slots_of, vocabularies_of

log = logging.getLogger("cohort")


class InPlace:
    """Fills a model's parameters, again and again. Only for models without an obstacle."""

    def __init__(self, model: nn.Module, *, is_eager: bool) -> None:
        """`is_eager`: no compiled graph knows by which function a layer multiplies."""
        self.ways: dict[str, Way] | None = None
        """Learned from the first complete update; empty where nothing could be."""
        self._model: Any = model
        self._slots = slots_of(model)
        self._packed: list[Any] = []
        self._unpacked: list[Any] = []
        if current_platform.is_cpu():
            self._packed, self._unpacked = vocabularies_of(model, leave_small=is_eager)
            if is_eager:
                leave_small_unpacked(self._slots)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Full weights under the names of the Hugging Face model, tied ones under one name or both.

        Raises ValueError when the model lacks a name or a parameter was not given whole, AssertionError for another
        shape; what was loaded until then stays."""
        given: dict[str, Given] = {}
        for slot in self._slots:
            slot.begin()
        try:
            if self.ways:
                self._along_ways(self.ways, weights)
            else:
                self._by_loaders(_noted(weights, given))
        finally:
            absent = dict.fromkeys(slot.layer_name for slot in self._slots if not slot.is_whole)
            for slot in self._slots:
                slot.begin()
        if absent:
            raise ValueError(f"the update lacks weights of {len(absent)} layers, {next(iter(absent))} among them")
        for layer in self._packed:
            layer.quant_method.process_weights_after_loading(layer)
        for layer in self._unpacked:
            layer.cpu_linear = nn.functional.linear
        if self.ways is None:
            self._learn(given)

    def _along_ways(self, ways: dict[str, Way], weights: Iterable[tuple[str, Tensor]]) -> None:
        followed: set[str] = set()
        for name, tensor in weights:
            way = ways.get(name)
            if way is not None and way.fits(tensor):
                way.follow(tensor, is_new=name not in followed)
                followed.add(name)
            else:
                self._by_loaders(iter([(name, tensor)]))  # which say what is wrong with it

    def _by_loaders(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        with opened(self._slots, lambda slot: slot.load):
            self._model.load_weights(weights)

    def _learn(self, given: dict[str, Given]) -> None:
        found = learn(self._model, self._slots, given)
        if isinstance(found, str):
            log.info("vLLM loads new weights name by name, which is slower: %s", found)
        self.ways = {} if isinstance(found, str) else found


def _noted(weights: Iterable[tuple[str, Tensor]], given: dict[str, Given]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        given[name] = tensor.shape, tensor.dtype
        yield name, tensor
