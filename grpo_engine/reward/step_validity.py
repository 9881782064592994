"""Step validity: the share of a solution's checkable steps that are right.

Checkable are arithmetic equations (12*7 = 84, chains, units, percentages, calculator marks, LaTeX) by exact fractions,
and equations in one variable that are transformed from line to line, by exact polynomials. Everything is bounded and
in process: no library that could hang.
"""

from __future__ import annotations

from grpo_engine.config_rewards import StepValidityReward
from grpo_engine.reward import (
    reasoning_equality,
    reasoning_equations,
    reasoning_nodes,
    reasoning_parser,
    reasoning_roots,
    reasoning_steps,
    reasoning_tokens,
    reasoning_transforms,
    reasoning_units,
    reasoning_values,
    reasoning_words,
)
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.reasoning_steps import Step, find_steps
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MAX_CHARACTERS = 200_000
"""What is looked at of a completion; the rest is left unread."""
_SHOWN_WRONG = 3
_SHOWN_CHARACTERS = 100
FILES = (
    reasoning_tokens.__file__, reasoning_words.__file__, reasoning_values.__file__, reasoning_units.__file__,
    reasoning_nodes.__file__, reasoning_parser.__file__, reasoning_equality.__file__, reasoning_equations.__file__,
    reasoning_roots.__file__, reasoning_transforms.__file__, reasoning_steps.__file__,
)  # fmt: skip
"""What reads and judges steps; with this file they decide the metric's version."""


def metric(config: StepValidityReward) -> Metric:
    """Value: right steps / checkable steps, each counted once; abstains below `min_steps` checkable steps."""

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        return judge_text(completion.text, config.min_steps)

    return Metric("step_validity", config.weight, version_of("step_validity", module_source(__file__, *FILES)), judge)


def judge_text(text: str, min_steps: int = 1) -> Judgement:
    """The judgement on one completion's text; the span is the first wrong step, else all from first to last."""
    steps = find_steps(text[:MAX_CHARACTERS])
    capped = f" Only the first {MAX_CHARACTERS:,} characters were read." if len(text) > MAX_CHARACTERS else ""
    if len(steps) < max(1, min_steps):
        few = "no step" if not steps else f"only {len(steps)} of the {min_steps} steps needed"
        return Judgement(None, f"There is {few} whose arithmetic can be checked.{capped}")
    wrong = [step for step in steps if not step.right]
    span = (wrong[0].start, wrong[0].end) if wrong else (steps[0].start, max(step.end for step in steps))
    number = len(steps) - len(wrong)
    counted = f"{number} of {len(steps)} checkable steps are right." if len(steps) > 1 else _single(wrong)
    return Judgement(number / len(steps), f"{counted}{_complaints(text, wrong)}{capped}", span)


def _single(wrong: list[Step]) -> str:
    return "The only checkable step is wrong." if wrong else "The only checkable step is right."


def _complaints(text: str, wrong: list[Step]) -> str:
    said = [f" Wrong: {_shorten(text[step.start : step.end])} ({step.why})." for step in wrong[:_SHOWN_WRONG]]
    return "".join(said) + (" …" if len(wrong) > _SHOWN_WRONG else "")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
