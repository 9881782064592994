"""Low-rank adapters (LoRA, arXiv 2106.09685) on a policy, by peft, in place: the model stays the object it was.

An adapted layer computes W x + (alpha / rank) B A x. A [rank, in] and B [out, rank] are trained, W [out, in] never
changes: weights for others are merged into copies, one tensor at a time, and nothing is ever subtracted again, since
merging and unmerging rounds W a little further away each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_engine.config_training import LoraAdapter
from grpo_engine.errors import CheckpointInvalid, InvalidConfig, Problem
from grpo_engine.model.loading import Policy

NAME = "default"
"""peft's name of the one adapter."""
FILE_PREFIX = "base_model.model."
"""What peft's files put before the layer's name in the plain model."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
SHOWN_NAMES = 12


def add_adapter(policy: Policy, config: LoraAdapter, seed: int) -> None:
    """Put an adapter beside each chosen linear layer and freeze everything else. A comes from `seed`, B is zero, so
    the policy computes what it did before.

    Adapter parameters are float32 (the base's type where that is wider), without dropout. Raises InvalidConfig naming
    `adapter.target_modules` for a name that no layer has."""
    model = policy.model
    if has_adapter(model):
        raise ValueError("the model has an adapter already")
    chosen = _chosen_layers(model, config.target_modules)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=_shortest_names(model, chosen),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in chosen.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model.name_or_path) or None,
    )
    with torch.random.fork_rng(devices=[]):
        # Drawn on the CPU, so that every rank and device starts from the same A.
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(lora, model, adapter_name=NAME)
    for layer in _layers(model).values():
        _widen(layer)


def has_adapter(model: nn.Module) -> bool:
    """Whether `add_adapter` has been here."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base alone; a model without an adapter is left as it is."""
    layers = list(_layers(model).values())
    before = [layer.disable_adapters for layer in layers]
    trained = {parameter: parameter.requires_grad for parameter in adapter_tensors(model).values()}
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer.enable_adapters(not was_off)
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)  # peft turns it on or off along with the layer


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's own parameters, not copies, by the names of peft's files:
    `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`."""
    return {
        f"{FILE_PREFIX}{name}.{part}.{rest}": parameter
        for name, layer in _layers(model).items()
        for part, matrix in (("lora_A", layer.lora_A[NAME]), ("lora_B", layer.lora_B[NAME]))
        for rest, parameter in matrix.named_parameters()
    }


@torch.no_grad()
def load_adapter_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` (named as in `adapter_tensors`) into the adapter.

    Raises CheckpointInvalid, changing nothing, when names or shapes are not this adapter's."""
    own = adapter_tensors(model)
    odd = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name].shape != tensors[name].shape]
    if odd:
        raise CheckpointInvalid(
            f"the adapter belongs to another model or adapter config: {len(odd)} tensors differ, {odd[0]} among them"
        )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


class FrozenAdapter:
    """The adapter as it is now, kept for later: the reference that a stage measures KL against.

    While B is zero everywhere the base is the reference and nothing needs to be kept. `tensors` (named as in
    `adapter_tensors`) stands in for the present adapter, such as one from a checkpoint."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> None:
        own = adapter_tensors(model)
        source = own if tensors is None else tensors
        if source.keys() != own.keys():
            raise CheckpointInvalid("the reference's adapter belongs to another model or adapter config")
        self._model = model
        self.tensors = {name: source[name].detach().to(p.device, p.dtype, copy=True) for name, p in own.items()}
        self.is_zero = not any(bool(tensor.any()) for name, tensor in self.tensors.items() if ".lora_B." in name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model computes as it did then; afterwards it holds the very tensors it held before."""
        if self.is_zero:
            with adapter_off(self._model):
                yield
            return
        parameters = adapter_tensors(self._model)
        present = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self.tensors[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = present[name]


# ---------------------------------------------------------------- files
def write_adapter_config(folder: Path, model: PreTrainedModel) -> None:
    """peft's description of the adapter. With `adapter_tensors` in WEIGHTS_FILE beside it (the learner's save writes
    them) it is what PeftModel.from_pretrained(base, folder) and vLLM load."""
    config = cast(Any, model.peft_config[NAME]).to_dict() | {"inference_mode": True}
    # Sets have no order of their own: sorted, equal adapters have equal files.
    texts = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(texts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> tuple[LoraAdapter, dict[str, Tensor]]:
    """Settings and tensors (named as in `adapter_tensors`) of a checkpoint's adapter.

    Raises CheckpointInvalid when they cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_bytes())
        config = LoraAdapter(rank=found["r"], alpha=found["lora_alpha"], target_modules=found["target_modules"])
        return config, load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointInvalid(f"the adapter in {folder} cannot be read: {error}") from error


# ---------------------------------------------------------------- merging
@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the plain model once (tied ones under one name), by its name there, adapters merged in.

    Adapted weights are copies made one at a time; the others are the model's own tensors, detached."""
    layers = _layers(model)
    for name, parameter in _base_parameters(model, layers):
        layer = layers.get(name.removesuffix(".weight"))
        yield name, parameter.detach() if layer is None else _merged(layer)


@torch.no_grad()
def merge_in_place(model: nn.Module) -> None:
    """Make `model` the plain model of the merged weights. For good: the base is overwritten."""
    for name, layer in _layers(model).items():
        _weight(layer).copy_(_merged(layer))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config


def base_hash(model: nn.Module) -> str:
    """SHA-256, hexadecimal, over name, type, shape and bytes of every base parameter; the adapter does not count.

    The parameters are hashed as they are in memory (float32), whatever type the files on disk have."""
    digest = hashlib.sha256()
    for name, parameter in sorted(_base_parameters(model, _layers(model))):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _merged(layer: LoraLinear) -> Tensor:
    weight = _weight(layer)
    return layer.get_delta_weight(NAME).add_(weight).to(weight.dtype)


def _weight(layer: LoraLinear) -> nn.Parameter:
    weight = layer.get_base_layer().weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _base_parameters(model: nn.Module, layers: Mapping[str, LoraLinear]) -> Iterator[tuple[str, nn.Parameter]]:
    """The plain model's parameters under the plain model's names."""
    adapter = {id(parameter) for parameter in adapter_tensors(model).values()}
    for name, parameter in model.named_parameters():
        owner, _, rest = name.rpartition(".base_layer.")
        if id(parameter) not in adapter:
            yield f"{owner}.{rest}" if owner in layers else name, parameter


def _layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Adapted layers by the name that the layer has in the plain model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _widen(layer: LoraLinear) -> None:
    """Adapter parameters are masters: at least float32."""
    base_type = _weight(layer).dtype
    masters = torch.promote_types(base_type, torch.float32)
    for module in (layer.lora_A[NAME], layer.lora_B[NAME]):
        module.to(masters)
    # Under autocast peft would turn the input into float32, and autocast back: two copies a layer for nothing.
    layer.cast_input_dtype_enabled = base_type != masters


# ---------------------------------------------------------------- target modules
def _chosen_layers(model: PreTrainedModel, names: list[str]) -> dict[str, nn.Module]:
    """Linear layers (GPT-2's Conv1D among them) that `names` choose: whole names or their last parts; all if empty.

    The output head is never among them: it may be tied to the embedding, and log-probabilities read its weight."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    for name in names:
        if not any(_names(layer, name) for layer in linear):
            raise _unknown_target(model, name, linear)
    return {n: m for n, m in linear.items() if not names or any(_names(n, name) for name in names)}


def _names(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _unknown_target(model: nn.Module, name: str, linear: Mapping[str, nn.Module]) -> InvalidConfig:
    exists = any(_names(module, name) for module, _ in model.named_modules())
    message = "is no layer that takes an adapter" if exists else "matches no layer of the model"
    there = sorted({layer.rpartition(".")[2] for layer in linear})
    listed = ", ".join(there[:SHOWN_NAMES]) + (" …" if len(there) > SHOWN_NAMES else "")
    remedy = f"choose among {listed}, or leave it empty for all of them"
    return InvalidConfig([Problem("adapter.target_modules", name[:100], message, remedy)])


def _shortest_names(model: nn.Module, chosen: Mapping[str, nn.Module]) -> list[str]:
    """Last parts of the layers' names where those match nothing else, for peft's config and whoever reads it."""
    lasts = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in lasts}
    return sorted(lasts) if matched == set(chosen) else sorted(chosen)
