"""Log-probabilities and entropy of tokens from hidden states and an output head, chunk by chunk.

With logits z = (W h + b) / temperature, p = softmax(z) and q = softmax over the kept ids K of a token t:

    full    = z_t - logsumexp(z)          gradient of z: onehot(t) - p
    policy  = z_t - logsumexp(z over K)   gradient of z: onehot(t) - q   (full where nothing was truncated)
    entropy = -sum p log p                gradient of z: -p log p - p entropy

The [N, V] logits never exist: forward and backward hold one chunk of them, which the backward computes again; when all
fits one chunk, p is kept instead. The softmax is float32 (float64 in a float64 model) whatever the compute type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from grpo_engine.model.packing import KeptIds


class Scores(NamedTuple):
    """All [N]."""

    policy: Tensor
    full: Tensor
    entropy: Tensor
    correct: Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How tokens are scored."""

    temperature: float
    chunk_rows: int
    entropy_gradient: bool = False
    """Without it the entropy carries no gradient."""


def score_hidden(head: nn.Module, features_NH: Tensor, target_N: Tensor, kept: KeptIds | None, how: Scoring) -> Scores:
    """Scores of N > 0 tokens. A plain linear head runs fused with the softmax; any other (an adapter on it, say) is
    called a chunk at a time, and once more in the backward pass."""
    if type(head) is nn.Linear:
        keep = torch.is_grad_enabled() and len(target_N) <= how.chunk_rows
        dtype = _compute_dtype(features_NH)
        arguments = (features_NH, head.weight, head.bias, target_N, kept, how, dtype, keep)
        return Scores(*_LinearScores.apply(*arguments))  # type: ignore[no-untyped-call]
    return _in_chunks(head, features_NH, target_N, kept, how)


def score_logits(logits_NV: Tensor, target_N: Tensor, kept: KeptIds | None, how: Scoring) -> Scores:
    """Scores of N > 0 tokens whose logits are there already."""
    return _in_chunks(lambda logits: logits, logits_NV, target_N, kept, how)


# ---------------------------------------------------------------- linear head
class _LinearScores(torch.autograd.Function):
    """features [N, H], weight [V, H], bias [V] or None; the rest carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        features_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        kept: KeptIds | None,
        how: Scoring,
        dtype: torch.dtype,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        head = _Head(features_NH, weight_VH, bias_V, dtype, how.temperature)
        parts: list[_Chunk] = []
        for start, end in _bounds(len(target_N), how.chunk_rows):
            z_CV, sets = head.logits(start, end), None if kept is None else kept.padded(start, end)
            parts.append(_score_in_place(z_CV, target_N[start:end], sets, keep))
        policy_N, full_N, entropy_N, correct_N, norm_N, kept_norm_N = (
            torch.cat(column) for column in zip(*(part[:6] for part in parts), strict=True)
        )
        p_NV, q_NK = parts[0].p_CV, parts[0].q_CK
        ctx.save_for_backward(features_NH, weight_VH, bias_V, target_N, entropy_N, norm_N, kept_norm_N, p_NV, q_NK)
        ctx.kept, ctx.how, ctx.dtype = kept, how, dtype
        ctx.mark_non_differentiable(correct_N, *(() if how.entropy_gradient else (entropy_N,)))
        ctx.set_materialize_grads(False)
        return policy_N, full_N, entropy_N, correct_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        features_NH, weight_VH, bias_V, target_N, entropy_N, norm_N, kept_norm_N, p_NV, q_NK = ctx.saved_tensors
        head = _Head(features_NH, weight_VH, bias_V, ctx.dtype, ctx.how.temperature)
        totals = _Gradients(head, ctx.needs_input_grad)
        for start, end in _bounds(len(target_N), ctx.how.chunk_rows):
            part = slice(start, end)
            sets = None if ctx.kept is None else ctx.kept.padded(start, end)
            p_CV, q_CK = p_NV, q_NK
            if p_NV is None:
                z_CV = head.logits(start, end)
                q_CK = None if sets is None else _kept_logits(z_CV, sets).sub_(kept_norm_N[part, None]).exp_()
                p_CV = z_CV.sub_(norm_N[part, None]).exp_()
            given = [None if gradient is None else gradient[part] for gradient in gradients[:3]]
            g_CV = _logit_gradient(p_CV, q_CK, target_N[part], entropy_N[part], sets, given, owned=p_NV is None)
            totals.add(start, end, g_CV)
        return totals.features_NH, totals.weight_VH, totals.bias_V, None, None, None, None, None


class _Chunk(NamedTuple):
    policy_C: Tensor
    full_C: Tensor
    entropy_C: Tensor
    correct_C: Tensor
    norm_C: Tensor
    kept_norm_C: Tensor
    p_CV: Tensor | None
    q_CK: Tensor | None


class _Head:
    """The head's logits over temperature, in a compute type; weights are cast once."""

    def __init__(
        self, features_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype, temperature: float
    ) -> None:
        self.features_NH, self.weight_VH = features_NH.to(dtype), weight_VH.to(dtype)
        self.bias_V = None if bias_V is None else bias_V.to(dtype)
        self.temperature = temperature
        self.sources = (features_NH, weight_VH, bias_V)

    def logits(self, start: int, end: int) -> Tensor:
        """[C, V] in at least float32, a buffer of the caller's own."""
        with torch.autocast(self.features_NH.device.type, enabled=False):
            logits_CV = nn.functional.linear(self.features_NH[start:end], self.weight_VH, self.bias_V)
        z_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if self.temperature != 1:
            z_CV.div_(self.temperature)
        if self.bias_V is not None:  # -inf x probability 0 would be NaN in the entropy
            z_CV.clamp_(min=torch.finfo(z_CV.dtype).min / 4)
        return z_CV


class _Gradients:
    """Gradients of features, weight and bias, summed over chunks in the inputs' own types."""

    def __init__(self, head: _Head, needed: tuple[bool, ...]) -> None:
        self._head = head
        features_NH, weight_VH, bias_V = head.sources
        self.features_NH = torch.empty_like(features_NH) if needed[0] else None
        self.weight_VH = torch.zeros_like(weight_VH) if needed[1] else None
        self.bias_V = torch.zeros_like(bias_V) if bias_V is not None and needed[2] else None

    def add(self, start: int, end: int, g_CV: Tensor) -> None:
        """`g_CV`: gradient of the chunk's logits over temperature."""
        if self._head.temperature != 1:
            g_CV = g_CV.div_(self._head.temperature)
        if self.bias_V is not None:
            self.bias_V += g_CV.sum(0)
        g_CV = g_CV.to(self._head.weight_VH.dtype)
        if self.features_NH is not None:
            self.features_NH[start:end] = g_CV @ self._head.weight_VH
        if self.weight_VH is not None:
            chunk_CH = self._head.features_NH[start:end]
            if g_CV.dtype == self.weight_VH.dtype:
                self.weight_VH.addmm_(g_CV.T, chunk_CH)
            else:
                self.weight_VH += g_CV.T @ chunk_CH


def _score_in_place(z_CV: Tensor, target_C: Tensor, sets: tuple[Tensor, Tensor] | None, keep: bool) -> _Chunk:
    """Scores of a chunk; `z_CV` is overwritten. With `keep`, p and q come along."""
    target_logit_C = z_CV.gather(1, target_C[:, None])[:, 0]
    top_C = z_CV.amax(1)
    kept_norm_C = q_CK = None
    if sets is not None:
        kept_CK = _kept_logits(z_CV, sets)
        kept_norm_C = kept_CK.logsumexp(1)
        q_CK = kept_CK.sub_(kept_norm_C[:, None]).exp_() if keep else None
    weight_CV = z_CV.sub_(top_C[:, None]).exp()
    sum_C = weight_CV.sum(1)
    log_sum_C = sum_C.log()
    entropy_C = log_sum_C - z_CV.mul_(weight_CV).sum(1) / sum_C
    norm_C = top_C + log_sum_C
    full_C = target_logit_C - norm_C
    policy_C = full_C.clone() if kept_norm_C is None else target_logit_C - kept_norm_C
    p_CV = weight_CV.div_(sum_C[:, None]) if keep else None
    kept_norm_C = norm_C if kept_norm_C is None else kept_norm_C
    return _Chunk(policy_C, full_C, entropy_C, target_logit_C == top_C, norm_C, kept_norm_C, p_CV, q_CK)


def _logit_gradient(
    p_CV: Tensor,
    q_CK: Tensor | None,
    target_C: Tensor,
    entropy_C: Tensor,
    sets: tuple[Tensor, Tensor] | None,
    given: list[Tensor | None],
    *,
    owned: bool,
) -> Tensor:
    """[C, V] gradient of z from those of policy, full and entropy; `p_CV` may be overwritten when `owned`."""
    nothing_C = torch.zeros_like(entropy_C)
    policy_C, full_C = (nothing_C if gradient is None else gradient for gradient in given[:2])
    entropy_gradient_C = given[2]
    to_target_C = policy_C + full_C
    from_all_C = full_C if sets is not None else to_target_C
    if entropy_gradient_C is None:
        g_CV = p_CV.mul_(-from_all_C[:, None]) if owned else p_CV * -from_all_C[:, None]
    else:
        g_CV = torch.special.entr(p_CV).mul_(entropy_gradient_C[:, None])
        g_CV.addcmul_(p_CV, (from_all_C + entropy_gradient_C * entropy_C)[:, None], value=-1)
    g_CV.scatter_add_(1, target_C[:, None], to_target_C[:, None])
    if sets is not None and q_CK is not None:
        g_CV.scatter_add_(1, sets[0], q_CK * -policy_C[:, None])
    return g_CV


def _kept_logits(z_CV: Tensor, sets: tuple[Tensor, Tensor]) -> Tensor:
    """[C, K], -inf where a set is shorter."""
    ids_CK, is_real_CK = sets
    return z_CV.gather(1, ids_CK).masked_fill_(~is_real_CK, -torch.inf)


# ---------------------------------------------------------------- any other head
def _in_chunks(
    head: Callable[[Tensor], Tensor], inputs_NF: Tensor, target_N: Tensor, kept: KeptIds | None, how: Scoring
) -> Scores:
    recompute = len(target_N) > how.chunk_rows and torch.is_grad_enabled()
    parts = []
    for start, end in _bounds(len(target_N), how.chunk_rows):
        sets = None if kept is None else kept.padded(start, end)
        arguments = (head, inputs_NF[start:end], target_N[start:end], sets, how)
        if recompute:  # only one chunk's logits are alive, in the backward pass too
            parts.append(checkpoint(_score, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_score(*arguments))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score(
    head: Callable[[Tensor], Tensor],
    inputs_CF: Tensor,
    target_C: Tensor,
    sets: tuple[Tensor, Tensor] | None,
    how: Scoring,
) -> Scores:
    logits_CV = head(inputs_CF)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / how.temperature
    target_logit_C = logits_CV.gather(1, target_C[:, None])[:, 0]
    full_C = policy_C = target_logit_C - logits_CV.logsumexp(1)
    if sets is not None:
        policy_C = target_logit_C - _kept_logits(logits_CV, sets).logsumexp(1)
    with torch.set_grad_enabled(how.entropy_gradient and torch.is_grad_enabled()):
        log_p_CV = logits_CV.log_softmax(1).clamp(min=torch.finfo(logits_CV.dtype).min)
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(1)
    return Scores(policy_C, full_C, entropy_C, target_logit_C.detach() == logits_CV.detach().amax(1))


def _compute_dtype(features: Tensor) -> torch.dtype:
    device = features.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype


def _bounds(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(start + size, count)
