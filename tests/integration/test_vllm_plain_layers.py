"""Which models take new weights in place, and of which it is learned where each weight goes. No engine is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.vllm_models import of_vllm

pytestmark = of_vllm
Weights = Iterable[tuple[str, Tensor]]


class Model(nn.Module):
    """A layer made of two parts that come by their own names, and a norm; `load` is what it does with them."""

    def __init__(self, load: Callable[[Model, str, Tensor], None] | None = None) -> None:
        super().__init__()
        self.both = nn.Linear(3, 4, bias=False)
        self.norm = nn.LayerNorm(3, bias=False)
        self.register_buffer("table", torch.arange(3.0))
        weight: Any = self.both.weight
        weight.weight_loader = lambda param, loaded, start: param.data.narrow(0, start, 2).copy_(loaded)
        self.load = load or Model.put

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)

    def put(self, name: str, tensor: Tensor) -> None:
        if name == "norm":
            getattr(self.norm.weight, "weight_loader", default)(self.norm.weight, tensor)
        else:
            weight: Any = self.both.weight
            weight.weight_loader(weight, tensor, {"first": 0, "second": 2}[name])


def default(param: Tensor, tensor: Tensor) -> None:
    raise AssertionError("an update puts a loader of its own at every parameter")


def weights(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=made) for n, s in {"first": (2, 3), "second": (2, 3), "norm": (3,)}.items()}


def recorded(model: nn.Module) -> nn.Module:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    return model


def in_place(model: nn.Module) -> Any:
    from grpo_engine.rollout.vllm.in_place import InPlace

    return InPlace(recorded(model), is_eager=True)


def expected(seed: int) -> list[Tensor]:
    given = weights(seed)
    return [torch.cat([given["first"], given["second"]]), given["norm"]]


# ---------------------------------------------------------------- whether
def prepares(model: Model) -> None:
    model.both.process_weights_after_loading = lambda: None  # type: ignore[assignment]


def prepares_as_a_whole(model: Model) -> None:
    model.process_weights_after_loading = lambda: None  # type: ignore[assignment]


def is_quantised(model: Model) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    model.both.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)


def is_another_shape(model: Model) -> None:
    model.both.weight = nn.Parameter(torch.zeros(3, 4))


def is_another_type(model: Model) -> None:
    model.table = model.table.double()


def has_a_scale(model: Model) -> None:
    model.both.register_buffer("scale", torch.ones(1))


def lost_a_weight(model: Model) -> None:
    model.norm.weight = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (prepares, "both prepares its weights"),
        (prepares_as_a_whole, "Model prepares its weights"),
        (is_quantised, "both is prepared by Fp8LinearMethod"),
        (is_another_shape, "both has another weight"),
        (is_another_type, "Model has another table"),
        (has_a_scale, "both has other tensors"),
        (lost_a_weight, "norm has other tensors"),
    ],
)
def test_what_a_reload_would_do_more_is_an_obstacle(change: Callable[[Model], None], words: str) -> None:
    from grpo_engine.rollout.vllm.plain_layers import obstacle

    model = Model()
    recorded(model)
    assert obstacle(model) is None
    change(model)
    assert words in str(obstacle(model))


def test_a_weight_that_is_no_matrix_is_packed_in_its_place() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from grpo_engine.rollout.vllm.plain_layers import obstacle

    layer: Any = nn.Conv1d(4, 4, 3, groups=4, bias=False)
    assert obstacle(recorded(layer)) is None
    layer.quant_method = UnquantizedLinearMethod()
    assert "no matrix" in str(obstacle(layer))


# ---------------------------------------------------------------- where weights go
def test_later_updates_are_the_copies_of_the_first() -> None:
    model = Model()
    updates = in_place(model)
    updates.load(weights(1).items())
    assert [torch.equal(*pair) for pair in zip(model.parameters(), expected(1), strict=True)] == [True, True]
    assert [len(way.moves) for way in updates.ways.values()] == [1, 1, 1]
    model.load = default  # type: ignore[assignment]
    updates.load(weights(2).items())
    assert [torch.equal(*pair) for pair in zip(model.parameters(), expected(2), strict=True)] == [True, True]


def scaled(model: Model, name: str, tensor: Tensor) -> None:
    model.put(name, tensor * 2)


def past_the_loader(model: Model, name: str, tensor: Tensor) -> None:
    model.put(name, tensor)
    with torch.no_grad():
        model.both.weight[:1].copy_(tensor[:1])


def kept_aside(model: Model, name: str, tensor: Tensor) -> None:
    model.put(name, tensor)
    aside = model.__dict__.setdefault("aside", {})
    if name not in aside:
        aside[name] = torch.empty(tensor.shape, device="meta")
    aside[name].copy_(tensor)


def looked_at(model: Model, name: str, tensor: Tensor) -> None:
    model.put(name, tensor)
    model.__dict__["largest"] = tensor.max()


def read(model: Model, name: str, tensor: Tensor) -> None:
    model.put(name, tensor)
    model.__dict__["first"] = float(tensor.flatten()[0])


@pytest.mark.parametrize("load", [scaled, past_the_loader, kept_aside, looked_at, read])
def test_a_model_that_does_more_than_put_its_weights_somewhere_always_does_it(load: Any) -> None:
    model, other = Model(load), Model(load)
    updates = in_place(model)
    updates.load(weights(1).items())
    assert updates.ways == {}
    updates.load(weights(2).items())
    in_place(other).load(weights(2).items())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    assert (model.__dict__.get("first"), model.__dict__.get("largest")) == (
        other.__dict__.get("first"), other.__dict__.get("largest"),
    )  # fmt: skip


def test_loaders_are_what_they_were_after_an_update_and_after_a_failed_one() -> None:
    model = Model()
    before = [parameter.__dict__.get("weight_loader") for parameter in model.parameters()]
    updates = in_place(model)
    for given in (weights(1), {"first": torch.zeros(1, 1)}, weights(2)):
        try:
            updates.load(given.items())
        except (ValueError, AssertionError):
            assert len(given) == 1
        assert [parameter.__dict__.get("weight_loader") for parameter in model.parameters()] == before
