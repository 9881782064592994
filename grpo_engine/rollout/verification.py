"""Which drafted tokens are kept, so that what is sampled is distributed exactly as without drafts.

Speculative sampling (Leviathan et al., arXiv:2211.17192, section 2.3 and appendix A.1). p is the distribution that
plain decoding samples from: temperature applied, truncated, renormalised. A drafted token x that was sampled from q is

    accepted with probability min(1, p(x) / q(x)); at the first refusal the token is sampled from
    max(0, p - q) / sum max(0, p - q) instead, and after K acceptances one more is sampled from p.

Then P(x) = min(p, q) + P(refused) x residual(x) = min(p, q) + max(0, p - q) = p(x), token by token.

A draft made with certainty (n-gram, greedy) is the case q(x) = 1: accepted with probability p(x), else replaced by a
sample from p without x. Both happen at once when the token is sampled from p as in plain decoding, with the same
random number, and the draft counts as accepted if it equals it. So these drafts do not even change which tokens are
sampled, and greedy decoding (p is 1 at the likeliest token) stays what it was; sampled drafts keep the distribution
only, and the tokens then depend on how many are drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.model.truncation import IMPOSSIBLE, kept_mask
from grpo_engine.rollout.choice import Choice, choose, inverse_distribution
from grpo_engine.rollout.drafting import Drafts


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens that B rows gained, up to Q = K + 1 each: accepted drafts and one token more. What lies beyond a row's
    count means nothing. Log-probabilities are the policy's, float32 nats, as `choice.Choice` has them."""

    tokens_BQ: Tensor
    counts_B: Tensor
    """int64, 1 ... Q."""
    logprobs_BQ: Tensor
    full_logprobs_BQ: Tensor
    kept_BQV: Tensor | None

    def last_B(self) -> Tensor:
        """Each row's last token; any where it gained none."""
        if self.tokens_BQ.shape[1] == 1:
            return self.tokens_BQ[:, 0]
        return self.tokens_BQ.gather(1, (self.counts_B - 1).clamp(min=0)[:, None])[:, 0]


def verify(
    logits_BQV: Tensor,
    drafts: Drafts,
    sampling: SamplingConfig,
    sample_BQ: Tensor | None,
    accept_BK: Tensor | None = None,
) -> Verified:
    """Accept drafts by the logits of the pending token and of each draft (`logits_BQV[:, d]` follows d drafts).

    `sample_BQ` (float64 in [0, 1), one a position) chooses tokens, None = greedily; `accept_BK` decides on drafts that
    were sampled, and must be independent of `sample_BQ` and of what the drafts were sampled with.
    """
    if drafts.logprobs_BKV is None or sample_BQ is None:
        return _certain(logits_BQV, drafts, sampling, sample_BQ)
    assert accept_BK is not None, "sampled drafts need numbers to decide on them"
    return _sampled(logits_BQV, drafts.tokens_BK, drafts.lengths_B, drafts.logprobs_BKV, sampling, sample_BQ, accept_BK)


def one_token(choice: Choice, counts_B: Tensor) -> Verified:
    """What was chosen without drafts; `counts_B` is 0 for a row that had ended."""
    kept_BQV = None if choice.kept_BV is None else choice.kept_BV[:, None]
    return Verified(
        choice.tokens_B[:, None], counts_B, choice.logprobs_B[:, None], choice.full_logprobs_B[:, None], kept_BQV
    )


def cut(verified: Verified, end_ids_E: Tensor, remaining_B: Tensor) -> Tensor:
    """int64 [B]: the counts, no row going on behind its first end token or beyond `remaining_B`."""
    num_tokens = verified.tokens_BQ.shape[1]
    place_Q = torch.arange(1, num_tokens + 1, device=end_ids_E.device)
    is_end_BQ = torch.isin(verified.tokens_BQ, end_ids_E)
    end_B = torch.where(is_end_BQ, place_Q, num_tokens).amin(dim=1)
    return torch.minimum(verified.counts_B, torch.minimum(end_B, remaining_B))


# ---------------------------------------------------------------- drafts made with certainty
def _certain(logits_BQV: Tensor, drafts: Drafts, sampling: SamplingConfig, sample_BQ: Tensor | None) -> Verified:
    shape_BQ = logits_BQV.shape[:2]
    numbers_N = None if sample_BQ is None else sample_BQ.flatten()
    choice = choose(logits_BQV.flatten(0, 1), sampling, numbers_N)
    tokens_BQ = choice.tokens_B.view(shape_BQ)
    agreed_BK = tokens_BQ[:, :-1] == drafts.tokens_BK
    kept_BQV = None if choice.kept_BV is None else choice.kept_BV.view(logits_BQV.shape)
    return Verified(
        tokens_BQ,
        _num_accepted(agreed_BK, drafts.lengths_B) + 1,
        choice.logprobs_B.view(shape_BQ),
        choice.full_logprobs_B.view(shape_BQ),
        kept_BQV,
    )


def _num_accepted(agreed_BK: Tensor, lengths_B: Tensor) -> Tensor:
    """int64 [B]: drafts before the first refusal or the draft's end."""
    depth_K = torch.arange(agreed_BK.shape[1], device=lengths_B.device)
    return (agreed_BK & (depth_K < lengths_B[:, None])).long().cumprod(dim=1).sum(dim=1)


# ---------------------------------------------------------------- drafts sampled from a distribution
def _sampled(
    logits_BQV: Tensor,
    drafted_BK: Tensor,
    lengths_B: Tensor,
    draft_logprobs_BKV: Tensor,
    sampling: SamplingConfig,
    sample_BQ: Tensor,
    accept_BK: Tensor,
) -> Verified:
    full_BQV, policy_BQV, kept_BQV = _distribution(logits_BQV, sampling)
    ratio_BK = _at(policy_BQV[:, :-1], drafted_BK) - _at(draft_logprobs_BKV, drafted_BK)
    # Strictly less, so that a draft of probability 0 is never accepted, whatever the number.
    accepted_B = _num_accepted(accept_BK < ratio_BK.double().exp(), lengths_B)
    row_B = torch.arange(len(accepted_B), device=accepted_B.device)
    # Behind a draft's end nothing was refused: the token more is then the policy's own.
    refused_B = accepted_B < lengths_B
    draft_BV = draft_logprobs_BKV[row_B, accepted_B.clamp(max=drafted_BK.shape[1] - 1)].double().exp()
    residual_BV = _residual(policy_BQV[row_B, accepted_B].double().exp(), draft_BV * refused_B[:, None])
    next_B = inverse_distribution(residual_BV, sample_BQ[row_B, accepted_B])
    tokens_BQ = torch.cat([drafted_BK, next_B[:, None]], dim=1).scatter(1, accepted_B[:, None], next_B[:, None])
    return Verified(tokens_BQ, accepted_B + 1, _at(policy_BQV, tokens_BQ), _at(full_BQV, tokens_BQ), kept_BQV)


def _residual(policy_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """max(0, p - q), float64, not normalised; p itself where rounding leaves nothing (p = q, hardly ever refused)."""
    residual_BV = (policy_BV - draft_BV).clamp(min=0)
    return torch.where(residual_BV.sum(dim=1, keepdim=True) > 0, residual_BV, policy_BV)


def _distribution(logits_BQV: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities before truncation, after it, what was kept), as `choice.choose` samples."""
    scaled_BQV = logits_BQV.float() / sampling.temperature
    full_BQV = torch.log_softmax(scaled_BQV, dim=-1)
    if not sampling.truncated:
        return full_BQV, full_BQV, None
    kept_NV = kept_mask(scaled_BQV.flatten(0, 1), sampling.top_k, sampling.top_p, sampling.min_p)
    kept_BQV = kept_NV.view(logits_BQV.shape)
    return full_BQV, torch.log_softmax(scaled_BQV.masked_fill(~kept_BQV, IMPOSSIBLE), dim=-1), kept_BQV


def _at(values_BQV: Tensor, tokens_BQ: Tensor) -> Tensor:
    """values_BQV[b, q, tokens_BQ[b, q]]."""
    return values_BQV.gather(2, tokens_BQ[..., None])[..., 0]
