from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.errors import InvalidConfig
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.packing import collate
from grpo_engine.model.recompute import enable_gradient_checkpointing
from grpo_engine.types import TrainRow
from tests.unit.tiny_models import tiny_model

ROWS = [TrainRow([5, 6, 7], [8, 9, 10, 11]), TrainRow([5, 6, 7], [4]), TrainRow([3], [9] * 15)]
CALLS = {
    "none": {"attention": 1, "feed_forward": 1},
    "full": {"attention": 2, "feed_forward": 2},
    "attention": {"attention": 2, "feed_forward": 1},
    "feed_forward": {"attention": 1, "feed_forward": 2},
}
"""How often one forward and backward pass computes each part of a layer."""


def counted(model: PreTrainedModel) -> Counter[str]:
    """Counts the calls of the first projection in each part of the model's first layer (recomputation stops early)."""
    counts: Counter[str] = Counter()
    layer: Any = model.transformer.h[0] if hasattr(model, "transformer") else model.model.layers[0]
    attention = layer.attn.c_attn if hasattr(layer, "attn") else layer.self_attn.q_proj
    feed_forward = layer.mlp.c_fc if hasattr(layer.mlp, "c_fc") else layer.mlp.gate_proj
    attention.register_forward_hook(lambda *_: counts.update(["attention"]))
    feed_forward.register_forward_hook(lambda *_: counts.update(["feed_forward"]))
    return counts


def gradient(forward: LogprobForward, *, packed: bool) -> list[Tensor | None]:
    batch = collate(ROWS, device=forward.device, packed=packed)
    forward(batch, 1.0).policy.sum().backward()
    return [parameter.grad for parameter in forward.model.parameters()]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("mode", CALLS)
def test_gradients_are_the_same_and_the_named_parts_run_twice(mode: Any, family: str, packed: bool) -> None:
    expected = gradient(LogprobForward(tiny_model(family)), packed=packed)
    model = tiny_model(family)
    enable_gradient_checkpointing(model, mode)
    forward = LogprobForward(model)
    counts = counted(model)
    found = gradient(forward, packed=packed)
    assert not model.training
    assert counts == CALLS[mode]
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_the_part_itself_keeps_nothing_for_the_backward_pass() -> None:
    kept = {}
    for mode in ("none", "full"):
        model = tiny_model("llama")
        enable_gradient_checkpointing(model, mode)
        forward, bytes_kept = LogprobForward(model), [0]

        def pack(tensor: Tensor, bytes_kept: list[int] = bytes_kept) -> Tensor:
            bytes_kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward.features(collate(ROWS, device=forward.device, packed=True))
        kept[mode] = bytes_kept[0]
    assert kept["full"] < 0.5 * kept["none"]


def test_without_gradient_nothing_is_recomputed_and_none_undoes_it() -> None:
    model = tiny_model("llama")
    plain = type(model.model.layers[0])
    enable_gradient_checkpointing(model, "full")
    assert type(model.model.layers[0]) is not plain
    with torch.no_grad():
        assert not LogprobForward(model)(collate(ROWS, device=model.device, packed=True), 1.0).policy.requires_grad
    enable_gradient_checkpointing(model, "attention")
    assert type(model.model.layers[0]) is plain
    enable_gradient_checkpointing(model, "none")
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert counted_calls_after_none(model) == CALLS["none"]


def counted_calls_after_none(model: PreTrainedModel) -> Counter[str]:
    forward = LogprobForward(model)
    counts = counted(model)
    gradient(forward, packed=True)
    return counts


def test_a_deep_copy_recomputes_with_its_own_weights() -> None:
    model = tiny_model("llama")
    enable_gradient_checkpointing(model, "full")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    assert all(part is None or part.isfinite().all() for part in gradient(LogprobForward(copied), packed=True))


def test_a_model_without_such_parts_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(InvalidConfig, match=r"memory\.gradient_checkpointing"):
        enable_gradient_checkpointing(model, "full")
