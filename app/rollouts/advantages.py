"""The words of the group page for each form of advantage: the group's formula, each completion's own numbers."""

from __future__ import annotations

from app.formatting import fixed, signed
from app.rollouts.service import CompletionDetail, GroupDetail

DROPPED = {
    "zero_variance": "its rewards are equal, so every advantage is 0 and nothing else in the loss has a gradient here",
    "all_abstained": "no part of the reward judged any of its completions",
}


def dropped_text(reason: str | None) -> str:
    """Why a group was not trained on; empty when it was."""
    return "" if reason is None else DROPPED.get(reason, reason.replace("_", " "))


def minus(value: float) -> str:
    """Example: minus(0.5) == "− 0.500", minus(-0.5) == "+ 0.500"."""
    return f"{'+' if value < 0 else '−'} {fixed(abs(value))}"


def formula(group: GroupDetail) -> str:
    """Example: "advantage = (reward − 0.594) / 0.707"."""
    numbers, kind = group.numbers, group.form.kind
    if kind == "gae":
        return _gae_formula(group)
    if numbers.mean is None:
        return "no reward: every part abstained"
    if not numbers.has_variance:
        return "all rewards are equal, so every advantage is 0"
    difference = f"reward {minus(numbers.mean)}"
    match kind:
        case "grpo":
            return f"advantage = ({difference}) / {fixed(numbers.scale)}"
        case "seed_paper":
            return f"advantage = ({difference}) / {fixed(numbers.scale)}, the population's deviation + 1e−8"
        case "dr_grpo":
            return f"advantage = {difference}"
        case "rloo":
            return "advantage = reward − mean of the other rewards"
        case "rank":
            count = numbers.num_scored
            return f"advantage = (2 · rank − {count} − 1) / {count - 1}, rank 1 the lowest"
    return f"advantage of the form {kind}"


def _gae_formula(group: GroupDetail) -> str:
    form = group.form
    known = [f"{name} {value:g}" for name, value in (("λ", form.gae_lambda), ("γ", form.gamma)) if value is not None]
    of_token = "return − value"
    if group.whitening is not None:
        of_token = f"({of_token} {minus(group.whitening.mean)}) / {fixed(group.whitening.std)}"
    elif form.whiten:
        of_token = f"{of_token}, whitened over the step's tokens"
    return f"advantage of a token = {of_token}; {', '.join(['GAE', *known])}; of a completion, the mean of its tokens"


def text(group: GroupDetail, row: CompletionDetail) -> str:
    """Example: "(1.072 − 0.710) / 0.500 = +0.72"."""
    numbers, kind, reward = group.numbers, group.form.kind, row.used_reward
    if reward is None or numbers.mean is None:
        return "no reward, so no advantage"
    if kind == "gae":
        return f"mean of {row.num_tokens} {'token' if row.num_tokens == 1 else 'tokens'} = {signed(row.advantage)}"
    if not numbers.has_variance:
        return "equal rewards, so 0"
    return f"{_left(group, row, reward)} = {signed(row.advantage)}"


def _left(group: GroupDetail, row: CompletionDetail, reward: float) -> str:
    count = group.numbers.num_scored
    if row.rank is not None:
        return f"rank {row.rank:g}: (2 · {row.rank:g} − {count} − 1) / {count - 1}"
    difference = f"{fixed(reward)} {minus(row.baseline)}" if row.baseline is not None else fixed(reward)
    return difference if group.numbers.scale is None else f"({difference}) / {fixed(group.numbers.scale)}"


# ---------------------------------------------------------------- shaped rewards
def shaping_formula(group: GroupDetail) -> str:
    """What was done to rewards before advantages; empty when nothing was."""
    if all(row.shaped_reward is None for row in group.completions):
        return ""
    form = group.form
    terms = []
    if form.kl_in_reward:
        terms.append(f" − {form.kl_in_reward:g} · sum of {form.kl_estimator}")
    if form.smooth_rewards:
        terms.append(" + shift to the smoothed reward")
    return f"shaped reward = reward{''.join(terms)}; advantages are computed from it"


def shaping_text(row: CompletionDetail) -> str:
    if row.shaped_reward is None or row.reward is None:
        return ""
    return f"{fixed(row.reward)} {minus(row.reward - row.shaped_reward)} = {fixed(row.shaped_reward)}"
