"""Weight updates in place against vLLM's own reload: the same model bit for bit, the same errors, the same storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.rollout.vllm.sampler import VLLMSampler
from tests.sampling import requests, settings
from tests.vllm_models import of_vllm, start_vllm, vllm_model, worst_gap

pytestmark = of_vllm
SMALL, LARGE = {"hidden_size": 128}, {"hidden_size": 512, "initializer_range": 0.05}
"""Of LARGE every matrix is packed on the CPU; of SMALL one of each layer."""
KINDS = [("llama", True, SMALL), ("llama", False, LARGE), ("mistral", True, LARGE), ("qwen2", False, SMALL)]
WAYS = ["copies", "loaders", "reload"]
"""How an update may be made: along learned ways, by vLLM's loaders into the same places, by vLLM's reload."""


@dataclass(frozen=True)
class Started:
    sampler: VLLMSampler
    family: str
    tied: bool
    shape: dict[str, Any]

    def model(self, seed: int) -> PreTrainedModel:
        """No two parameters of two seeds are alike, norms and biases included."""
        made = vllm_model(self.family, tied=self.tied, seed=seed, **self.shape)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.02)
        return made

    def new(self, seed: int) -> dict[str, Tensor]:
        return dict(self.model(seed).named_parameters())

    @property
    def receiver(self) -> Any:
        engine: Any = self.sampler._engine
        return engine._vllm.model_executor.driver_worker.worker.weight_transfer_engine

    def load(self, weights: dict[str, Tensor] | list[tuple[str, Tensor]], how: str = "copies") -> None:
        in_place = self.receiver.in_place
        ways = in_place.ways
        assert ways
        self.receiver.in_place = None if how == "reload" else in_place
        in_place.ways = {} if how == "loaders" else ways
        try:
            self.sampler.load_weights(weights.items() if isinstance(weights, dict) else weights, 1)
        finally:
            self.receiver.in_place, in_place.ways = in_place, ways


@pytest.fixture(scope="module", params=KINDS, ids=["llama-tied", "llama-large", "mistral-tied-large", "qwen2"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    family, tied, shape = request.param
    sampler = start_vllm(vllm_model(family, tied=tied, **shape), tmp_path_factory.mktemp(family))
    yield Started(sampler, family, tied, shape)
    sampler.close()


@torch.no_grad()
def state(model: Any) -> dict[str, Tensor]:
    """Every parameter, and what every layer makes of the same rows."""
    found = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and "embed" not in name:
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            rows = torch.randn(3, width, generator=generator)
            found[f"{name} times rows"] = layer.cpu_linear(rows, layer.weight, None)
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """vLLM's reload packs a small head, which an update in place does not."""
    near = "lm_head times rows"
    assert torch.allclose(found[near], expected[near], rtol=0, atol=1e-4)
    return [name for name in found if name != near and not torch.equal(found[name], expected[name])]


def packed(model: Any) -> set[str]:
    return {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.numel() == 0}


def test_matrices_are_packed_where_it_pays(started: Started) -> None:
    large = started.shape == LARGE
    expected = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} if large else {"gate_up_proj"}
    assert packed(started.receiver.model) == expected
    [head] = [layer for name, layer in started.receiver.model.named_modules() if name == "lm_head"]
    assert (head.cpu_linear is nn.functional.linear) == (not large)


@pytest.mark.parametrize("how", ["copies", "loaders"])
def test_an_update_in_place_leaves_what_vllms_reload_leaves(started: Started, how: str) -> None:
    model = started.receiver.model
    started.load(started.new(8), "reload")
    expected = state(model)
    started.load(started.new(9), "reload")
    other = state(model)
    started.load(started.new(8), how)
    found = state(model)
    assert found.keys() == expected.keys()
    assert sum(name.endswith("times rows") for name in found) == 9  # four of each layer, and the head
    assert differing(found, expected) == []
    assert [name for name in found if found[name].numel() and torch.equal(found[name], other[name])] == []


def test_ways_of_all_weights_are_learned(started: Started) -> None:
    assert started.receiver.in_place.ways.keys() == started.new(8).keys()


def test_parameters_stay_the_objects_and_the_memory_they_were(started: Started) -> None:
    model = started.receiver.model

    def places() -> list[tuple[str, int, int]]:
        return [(name, id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()]

    before = places()
    started.load(started.new(8))
    assert places() == before
    assert all("load" not in str(getattr(p, "weight_loader", "")) or p.numel() for p in model.parameters())


def test_weights_go_in_any_order_of_any_type_and_where_they_lie_in_memory(started: Started) -> None:
    """Reversed; half of them float64; views into a larger tensor; transposed in memory; one given twice."""
    weights = started.new(8)
    started.load(weights, "reload")
    expected = state(started.receiver.model)
    started.load(started.new(9))
    changed: list[tuple[str, Tensor]] = []
    for place, (name, tensor) in enumerate(reversed(weights.items())):
        flat = torch.cat([torch.zeros(5), tensor.detach().flatten()])[5:].view(tensor.shape)
        changed.append((name, (flat.double(), flat, flat.t().contiguous().t())[place % 3]))
    started.load([*changed, changed[0]])
    assert differing(state(started.receiver.model), expected) == []


# ---------------------------------------------------------------- what is refused
def broken(weights: dict[str, Tensor], fault: str) -> list[tuple[str, Tensor]]:
    """The weights without one, with one too many, or one of another shape."""
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "absent":
        return [(n, tensor) for n, tensor in weights.items() if n != name]
    if fault == "unknown":
        return [*weights.items(), ("model.surprise", torch.zeros(3))]
    if fault == "twice":  # its size, but not what is missing
        return [("model.layers.1.self_attn.v_proj.weight" if n == name else n, tensor) for n, tensor in weights.items()]
    return [(n, tensor[:, 1:] if n == name else tensor) for n, tensor in weights.items()]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("absent", ValueError, r"lacks weights of 1 layers, model.layers.1.self_attn.qkv_proj"),
        ("unknown", ValueError, "no module or parameter named 'surprise'"),
        ("shape", AssertionError, ""),
    ],
)
def test_each_way_refuses_the_same_and_takes_the_next(
    started: Started, how: str, fault: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        started.load(broken(started.new(8), fault), how)
    with pytest.raises(RuntimeError, match="no complete weights"):
        started.sampler.sample(requests(["1"]), settings())
    new = started.model(9)
    started.load(dict(new.named_parameters()), how)
    asked = requests(["347+285=", "the quick brown fox"])
    assert worst_gap(new, asked, started.sampler.sample(asked, settings(temperature=0.7, top_k=4)), 0.7) <= 1e-4


def test_one_part_given_twice_does_not_count_for_the_one_that_is_missing(started: Started) -> None:
    with pytest.raises(ValueError, match="qkv_proj"):
        started.load(broken(started.new(8), "twice"))
    started.load(started.new(7))
