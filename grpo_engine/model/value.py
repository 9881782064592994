"""PPO's critic: a scalar head on hidden states.

`copied` has a backbone of its own, a copy of the policy's; `shared` reads the policy's hidden states, so that its loss
pulls at the policy too. The head begins at zero: every value is 0 until the first update, and a token's first advantage
is the sum of the rewards from it on, each decayed by gamma x lambda a token (with both 1 the return). The critic sees
exactly what the policy sees: the value of a token is read where the hidden state sits that predicts it, before the
token is known.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.packing import TokenBatch


class ValueModel(nn.Module):
    """Parameters are float32 masters (float64 of a float64 policy); `dtype` bfloat16 computes the backbone under
    autocast, the head never.

    `named_parameters()` are the critic's own: head, and backbone when it is copied. Parameters of the policy that are
    frozen (a base under an adapter) are shared with the copy, not copied: nobody writes to them."""

    def __init__(self, policy_model: PreTrainedModel, backbone: Literal["copied", "shared"], dtype: str) -> None:
        super().__init__()
        output: Any = policy_model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.is_shared = backbone == "shared"
        model = policy_model if self.is_shared else _copy(policy_model)
        self._forward = LogprobForward(model, dtype=dtype)
        self.backbone: nn.Module | None = None if self.is_shared else model.base_model
        self.head = nn.Linear(
            output.weight.shape[1], 1, device=policy_model.device,
            dtype=torch.promote_types(output.weight.dtype, torch.float32),
        )  # fmt: skip
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def model(self) -> PreTrainedModel:
        """Whose hidden states are read."""
        return self._forward.model

    @property
    def device(self) -> torch.device:
        return self._forward.device

    @property
    def packed(self) -> bool:
        """How batches for `values` are to be collated."""
        return self._forward.packed

    def values(self, batch: TokenBatch, features: Tensor | None = None) -> Tensor:
        """[N] value before each completion token, in the head's type.

        `features` [N, H]: the policy's hidden states where a shared backbone has run already; without them (and always
        with a backbone of its own) the backbone runs here."""
        if features is None or not self.is_shared:
            features = self._forward.features(batch)
        with torch.autocast(features.device.type, enabled=False):
            values: Tensor = self.head(features.to(self.head.weight.dtype)).squeeze(-1)
        return values


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose frozen parameters and output head are the original's own: neither is trained by the critic."""
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    backbone = {id(parameter) for parameter in model.base_model.parameters()}
    kept = [p for p in model.parameters() if not p.requires_grad]
    kept += [p for p in output.parameters() if id(p) not in backbone]
    copied: PreTrainedModel = copy.deepcopy(model, {id(parameter): parameter for parameter in kept})
    return copied
