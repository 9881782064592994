"""Logical consistency: 1 unless the solution contradicts itself.

Looked for are: a final answer that is not what the reasoning concludes, a variable that is given two values, a claim
and its contrary. Abstains when there is nothing that could have contradicted itself. Patterns over the text, bounded.
"""

from __future__ import annotations

from grpo_engine.config_rewards import Extract, LogicalConsistencyReward
from grpo_engine.reward import (
    extraction,
    reasoning_claims,
    reasoning_conclusion,
    reasoning_folding,
    reasoning_quantities,
    reasoning_variables,
)
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MAX_CHARACTERS = 100_000
"""What is looked at of a completion: its end, where the conclusion stands."""
FILES = (
    extraction.__file__, reasoning_claims.__file__, reasoning_conclusion.__file__, reasoning_folding.__file__,
    reasoning_quantities.__file__, reasoning_variables.__file__,
)  # fmt: skip


def metric(config: LogicalConsistencyReward) -> Metric:
    """Value: 0 with a contradiction, 1 with something compared and no contradiction, else abstained."""

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        opened = extraction.opens_thinking(prompt.text)
        return judge_text(completion.text, config.extract, thinking_opened=opened)

    version = version_of("logical_consistency", module_source(__file__, *FILES))
    return Metric("logical_consistency", config.weight, version, judge)


def judge_text(text: str, extract: Extract = "after_think", *, thinking_opened: bool = False) -> Judgement:
    """The judgement on one completion's text; the span is the contradiction, else the final answer."""
    cut = max(0, len(text) - MAX_CHARACTERS)
    found = extraction.extract(extract, text, thinking_opened=thinking_opened)
    said = _judged(text[cut:], None if found.span is None else (max(0, found.span[0] - cut), found.span[1] - cut))
    span = None if said.span is None else (said.span[0] + cut, said.span[1] + cut)
    capped = f" Only the last {MAX_CHARACTERS:,} characters were read." if cut else ""
    return Judgement(said.value, said.explanation + capped, span)


def _judged(text: str, answer: tuple[int, int] | None) -> Judgement:
    concluded = reasoning_conclusion.disagreement(text, answer) if answer is not None else None
    if concluded is not None and concluded[0]:
        return Judgement(0.0, concluded[1], concluded[2])
    compared, conflict = reasoning_variables.two_values(text)
    if conflict is None:
        claims, conflict = reasoning_claims.contrary_claims(text)
        compared += claims
    if conflict is not None:
        return Judgement(0.0, conflict.why, (conflict.start, conflict.end))
    if concluded is not None:
        return Judgement(1.0, f"{concluded[1]} No variable has two values, no claim its contrary.", concluded[2])
    if compared:
        return Judgement(1.0, "Variables and claims that are named again agree with what was said before.")
    return Judgement(None, "There is no conclusion, variable or claim that could be compared with another.")
