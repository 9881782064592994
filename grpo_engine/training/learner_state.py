"""The learner on disk: `masters.safetensors`, `optimizer.safetensors` and `learner.json`. No pickle.

Masters are stored even though the checkpoint's root may hold equal bytes: the learner restores from this folder alone,
and the root stays free to change its type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.errors import CheckpointInvalid

FORMAT = 1
MASTERS, OPTIMIZER, LEARNER = "masters.safetensors", "optimizer.safetensors", "learner.json"
COUNTERS = ("policy_version", "schedule_step", "skipped_steps", "consecutive_skipped")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def write(
    folder: Path,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    moments = {
        f"{moment}.{name}": value.detach().contiguous()
        for name, parameter in parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / MASTERS)
    save_file(moments, folder / OPTIMIZER)
    (folder / LEARNER).write_text(json.dumps({"format": FORMAT, **counters}, indent=1) + "\n")


@torch.no_grad()
def read(
    folder: Path,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> dict[str, int]:
    """Copy into `weights` and `optimizer` in place; returns the counters. Nothing is changed when anything is amiss."""
    state = json.loads((folder / LEARNER).read_text())
    if state.pop("format", None) != FORMAT or set(state) != set(COUNTERS):
        raise CheckpointInvalid(f"{folder / LEARNER} is not of format {FORMAT}")
    masters = load_file(folder / MASTERS)
    moments = load_file(folder / OPTIMIZER)
    _check_same(folder / MASTERS, masters, weights)
    _check_moments(folder / OPTIMIZER, moments, parameters)
    for name, weight in weights.items():
        weight.copy_(masters[name])
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if f"step.{name}" in moments:
            optimizer.state[parameter] = {m: moments[f"{m}.{name}"].to(parameter.device) for m in MOMENTS}
    return {name: int(state[name]) for name in COUNTERS}


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


def _check_moments(path: Path, moments: Mapping[str, Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """A parameter has all its moments or none (it never had a gradient)."""
    started = {name for name in parameters if f"step.{name}" in moments}
    expected = {f"{moment}.{name}" for name in started for moment in MOMENTS}
    if moments.keys() != expected:
        odd = sorted(moments.keys() ^ expected)
        raise CheckpointInvalid(f"{path} is not this optimizer's state: {', '.join(odd[:5])}")
    for name in started:
        if moments[f"exp_avg.{name}"].shape != parameters[name].shape:
            raise CheckpointInvalid(f"{path}: exp_avg of {name} has shape {tuple(moments[f'exp_avg.{name}'].shape)}")
