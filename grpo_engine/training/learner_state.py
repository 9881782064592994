"""The learner on disk: weights and optimizer of policy and value model, and `learner.json`. No pickle.

    masters.safetensors     every parameter of the policy
    adapter/                in its place with an adapter: adapter_model.safetensors, named as peft names them
    optimizer.safetensors   AdamW's moments of what is trained
    value/                  value.safetensors and optimizer.safetensors of PPO's critic
    mtp/                    mtp.safetensors and optimizer.safetensors of the multi-token prediction heads
    learner.json            counters, the learned token limit, the rate's scale after rollbacks

Masters are stored even though the checkpoint's root may hold equal bytes: the learner restores from this folder alone,
and the root stays free to change its type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from grpo_engine.errors import CheckpointInvalid
from grpo_engine.model.adapters import WEIGHTS_FILE

FORMAT = 2
MASTERS, ADAPTER, OPTIMIZER, LEARNER = (
    "masters.safetensors", f"adapter/{WEIGHTS_FILE}", "optimizer.safetensors", "learner.json"
)  # fmt: skip
VALUE, VALUE_OPTIMIZER = "value/value.safetensors", "value/optimizer.safetensors"
MTP, MTP_OPTIMIZER = "mtp/mtp.safetensors", "mtp/optimizer.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Counters:
    """learner.json."""

    policy_version: int
    schedule_step: int
    skipped_steps: int
    consecutive_skipped: int
    rate_scale: float
    max_micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What of the learner one pair of files holds."""

    weights_file: str
    weights: Mapping[str, Tensor]
    moments_file: str
    parameters: Mapping[str, Parameter]
    """Those of `weights` that are trained."""
    may_differ: bool = False
    """A fork's origin may lack these files, or some tensors, or have more: what both have is read, the rest stays as it
    was made."""

    def weights_in(self, folder: Path) -> dict[str, Tensor]:
        path = folder / self.weights_file
        if not self.may_differ:
            return load_file(path)
        return {name: tensor for name, tensor in _if_there(path).items() if name in self.weights}

    def moments_in(self, folder: Path) -> dict[str, Tensor]:
        path = folder / self.moments_file
        if not self.may_differ:
            return load_file(path)
        return {name: tensor for name, tensor in _if_there(path).items() if name.partition(".")[2] in self.parameters}


def write(folder: Path, parts: Sequence[Part], optimizer: torch.optim.Optimizer, counters: Counters) -> None:
    for part in parts:
        (folder / part.weights_file).parent.mkdir(parents=True, exist_ok=True)
        moments = {
            f"{moment}.{name}": value.detach().contiguous()
            for name, parameter in part.parameters.items()
            for moment, value in optimizer.state.get(parameter, {}).items()
        }
        weights = {name: weight.detach().contiguous() for name, weight in part.weights.items()}
        save_file(weights, folder / part.weights_file, metadata={"format": "pt"})
        save_file(moments, folder / part.moments_file)
    (folder / LEARNER).write_text(json.dumps({"format": FORMAT, **asdict(counters)}, indent=1) + "\n")


@torch.no_grad()
def read(folder: Path, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> Counters:
    """Copy into weights and optimizer in place. Raises CheckpointInvalid, changing nothing, when anything is amiss."""
    try:
        state = json.loads((folder / LEARNER).read_text())
        loaded = [(part, part.weights_in(folder), part.moments_in(folder)) for part in parts]
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointInvalid(f"{folder} is not the state of this learner: {error}") from error
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT or state.keys() != _fields():
        raise CheckpointInvalid(f"{folder / LEARNER} is not of format {FORMAT}")
    for part, weights, moments in loaded:
        own = {name: part.weights[name] for name in weights} if part.may_differ else part.weights
        _check_same(folder / part.weights_file, weights, own)
        _check_moments(folder / part.moments_file, moments, part.parameters)
    optimizer.state.clear()
    for part, weights, moments in loaded:
        for name, tensor in weights.items():
            part.weights[name].copy_(tensor)
        for name, parameter in part.parameters.items():
            if f"step.{name}" in moments:
                optimizer.state[parameter] = {m: moments[f"{m}.{name}"].to(parameter.device) for m in MOMENTS}
    return Counters(**state)


def read_heads(folder: Path, parameters: Mapping[str, Parameter]) -> None:
    """Copy the multi-token prediction heads of another run's state, as far as there are any.

    Raises CheckpointInvalid, changing nothing, when they cannot be read or belong to another model."""
    part = Part(MTP, parameters, MTP_OPTIMIZER, {}, may_differ=True)
    try:
        weights = part.weights_in(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointInvalid(f"{folder / MTP} cannot be read: {error}") from error
    _check_same(folder / MTP, weights, {name: parameters[name] for name in weights})
    for name, tensor in weights.items():
        parameters[name].data.copy_(tensor)


def _if_there(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.exists() else {}


def _fields() -> set[str]:
    return set(Counters.__dataclass_fields__)


def _check_same(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        raise CheckpointInvalid(
            f"{path} belongs to another model: tensors {', '.join(odd[:5])} are in only one of them"
        )
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise CheckpointInvalid(
                f"{path} belongs to another model: {name} is {found[name].dtype} {tuple(found[name].shape)} there, "
                f"{tensor.dtype} {tuple(tensor.shape)} here"
            )


def _check_moments(path: Path, moments: Mapping[str, Tensor], parameters: Mapping[str, Parameter]) -> None:
    """A parameter has all its moments or none (it never had a gradient)."""
    started = {name for name in parameters if f"step.{name}" in moments}
    expected = {f"{moment}.{name}" for name in started for moment in MOMENTS}
    if moments.keys() != expected:
        odd = sorted(moments.keys() ^ expected)
        raise CheckpointInvalid(f"{path} is not this optimizer's state: {', '.join(odd[:5])}")
    for name in started:
        for moment in MOMENTS[1:]:
            shape = moments[f"{moment}.{name}"].shape
            if shape != parameters[name].shape:
                raise CheckpointInvalid(f"{path}: {moment} of {name} has shape {tuple(shape)}")
