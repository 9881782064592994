"""AdamW's parameter groups, and gradients over ranks: summed in flat buckets, measured, clipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_engine.config_training import OptimizerConfig
from grpo_engine.protocols import Communicator

BUCKET_BYTES = 25 * 2**20
"""Of one all-reduce: large enough that latency does not count, small enough to cost no memory."""


class OwnRate(Protocol):
    """Parameters with a learning rate of their own."""

    parameters: dict[str, Parameter]
    learning_rate: float


def adamw(
    policy: Mapping[str, Parameter],
    value: Mapping[str, Parameter],
    config: OptimizerConfig,
    mtp: OwnRate | None = None,
) -> torch.optim.AdamW:
    """One optimizer; each of its groups says in "part" whose parameters it holds: policy, value or mtp.

    Decay applies to matrices only; norms and biases are left alone, as Hugging Face's trainer does. The heads of
    multi-token prediction have none, and a rate that follows no schedule: they must keep up to the last step."""
    groups = []
    for part, parameters in (("policy", policy), ("value", value)):
        matrices = [p for p in parameters.values() if p.ndim >= 2]
        others = [p for p in parameters.values() if p.ndim < 2]
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "part": part})
        groups.append({"params": others, "weight_decay": 0.0, "part": part})
    if mtp is not None:
        own = {"params": list(mtp.parameters.values()), "weight_decay": 0.0, "part": "mtp", "lr": mtp.learning_rate}
        groups.append(own)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=all(p.device.type in ("cpu", "cuda") for p in (*policy.values(), *value.values())),
    )


def sum_gradients(parameters: Sequence[Parameter], communicator: Communicator) -> None:
    """Every gradient becomes its sum over the ranks; one that is absent here counts as zeros.

    Give it the same parameters on every rank. Gradients end as views of the buckets, so they are copied once."""
    if communicator.world_size == 1:
        return
    for bucket in _buckets(parameters):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        for parameter in bucket:
            parameter.grad = None
        communicator.sum_([flat])
        for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Neighbours of one type and device, about BUCKET_BYTES together."""
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        alike = bool(bucket) and (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not alike or size + num_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    if bucket:
        yield bucket


def gradient_norm(parameters: Sequence[Parameter], device: torch.device) -> Tensor:
    """L2 norm of all gradients together: a scalar, float64, on `device`; 0 without any."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).to(device, torch.float64)


def scale_gradients(parameters: Sequence[Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients whose common norm is `norm` down to `max_norm`; smaller ones keep their bits."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / norm)
