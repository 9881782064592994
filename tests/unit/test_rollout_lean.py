"""Layers written out for steps: which models get them, and that they are the modules' own results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaModel, PreTrainedModel

from grpo_engine.rollout.forward import Forward
from grpo_engine.rollout.lean import ByTorch, lean_layers
from grpo_engine.rollout.native import layer
from grpo_engine.rollout.native.layer import InC
from grpo_engine.rollout.open_rows import open_rows, shared_rows_are_exact
from grpo_engine.rollout.rows import SharedRows
from tests.unit.tiny_models import tiny_model

PROMPT, FED = [5, 6, 7, 8, 9, 10, 11, 12], [[3, 4, 9]]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def varied(family: str) -> PreTrainedModel:
    """Norms and biases unlike each other, as training leaves them: new ones are all 1 and 0. Their epsilon counts."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.3, 1.7)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1
    return model


def opened(model: PreTrainedModel) -> Forward:
    forward = Forward(model.train(False), 64)
    assert shared_rows_are_exact(forward)
    return forward


@torch.no_grad()
def differences(forward: Forward) -> tuple[float, float]:
    """Largest difference of a step's logits, and of its hidden states, from the modules' own."""
    outputs = []
    for written_out in (True, False):
        forward.uses_lean = written_out
        rows = SharedRows(forward)
        rows.admit([PROMPT], [1])
        outputs.append(rows.feed(torch.tensor(FED)))
    ours, theirs = outputs
    assert ours.hidden_BQH is not None
    assert theirs.hidden_BQH is not None
    return (
        float((ours.logits_BQV - theirs.logits_BQV).abs().max()),
        float((ours.hidden_BQH - theirs.hidden_BQH).abs().max()),
    )


FAMILIES = ("llama", "untied", "wide", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_through_them_is_the_step_through_the_modules(family: str) -> None:
    forward = opened(varied(family))
    assert forward.lean is not None
    assert max(differences(forward)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_is_without_a_c_compiler(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "library", lambda: None)
    test_a_step_through_them_is_the_step_through_the_modules(family)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_other_models_keep_their_modules(family: str) -> None:
    assert opened(tiny_model(family)).lean is None


def test_new_weights_count_at_once() -> None:
    model = tiny_model("qwen3")
    forward = opened(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert max(differences(forward)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_autocast_gives_what_the_modules_give_under_it(family: str) -> None:
    forward = opened(varied(family))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert max(differences(forward)) < 0.05


@pytest.mark.parametrize("name", LINEAR)
def test_an_exchanged_module_is_left_to_the_library(name: str) -> None:
    adapted: Any = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=[name]))
    assert lean_layers(adapted.get_base_model()) is None


def test_what_only_descends_from_a_known_class_and_another_activation_are_left_to_the_library() -> None:
    assert lean_layers(tiny_model("llama")) is not None
    model: Any = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = type("Quantised", (nn.Linear,), {})
    assert lean_layers(model) is None
    model = tiny_model("llama")
    model.model.__class__ = type("Changed", (LlamaModel,), {})
    assert lean_layers(model) is None
    other = tiny_model("llama")
    other.config.hidden_act = "gelu"
    assert lean_layers(other) is None


def test_layers_that_come_out_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (InC, ByTorch):
        monkeypatch.setattr(kind, "rotated", lambda self, query, key, *_: (query, key))
    assert opened(tiny_model("llama")).lean is None


def test_layers_that_raise_are_not_used() -> None:
    assert opened(tiny_model("llama").double()).lean is None


@pytest.mark.parametrize("watch", ["register_forward_hook", "register_forward_pre_hook"])
def test_whoever_watches_a_module_sees_every_step(watch: str) -> None:
    model: Any = tiny_model("llama")
    forward = opened(model)
    open_rows(forward, shared=True, room_tokens=8)
    assert forward.uses_lean
    seen = []
    getattr(model.model.layers[1].mlp, watch)(lambda *_: seen.append(1))
    rows = open_rows(forward, shared=True, room_tokens=8)
    rows.admit([PROMPT], [1])
    rows.feed(torch.tensor(FED))
    assert len(seen) == 2
