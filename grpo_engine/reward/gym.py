"""Gym: the scorer that the package reasoning-gym ships with each of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from grpo_engine.errors import RewardError
from grpo_engine.reward import extraction
from grpo_engine.reward.accuracy import shorten
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart

Scorer = Callable[[str | None, dict[str, Any]], float]


def _version() -> str:
    package = metadata.version("reasoning-gym").encode()
    return version_of("gym", module_source(__file__, extraction.__file__), package)


@dataclass
class Gym:
    """`task`'s own score_answer(answer, entry); the entry is the prompt's columns question, answer and metadata.

    The package is imported at the first score. A scorer that raises makes that completion abstain.
    """

    weight: float
    extract: extraction.Method
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = "gym"
    version: str = field(default_factory=_version)
    _scorer: Scorer | None = field(default=None, repr=False)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        if self._scorer is None:
            self._scorer = load_scorer(self.task, self.options)
        scorer = self._scorer
        return [self._judge(scorer, prompt, done) for prompt, done in zip(prompts, completions, strict=True)]

    def _judge(self, scorer: Scorer, prompt: Prompt, completion: Completion) -> RewardPart:
        opened = extraction.opens_thinking(prompt.text)
        found = extraction.extract(self.extract, completion.text, thinking_opened=opened)
        if found.text is None:
            return self._part(0.0, f"{found.reason}, so there is no answer.")
        try:
            value = float(scorer(found.text, _entry(prompt)))
        except Exception as error:
            return self._part(None, f"The scorer of {self.task} failed: {type(error).__name__}: {error}.", found.span)
        return self._part(value, f"{self.task} scores {shorten(found.text)} with {value:.3g}.", found.span)

    def _part(self, value: float | None, explanation: str, span: tuple[int, int] | None = None) -> RewardPart:
        return RewardPart(self.name, value, self.weight, explanation, span, self.version)


def _entry(prompt: Prompt) -> dict[str, Any]:
    columns = prompt.columns
    return {
        "question": columns.get("question", prompt.text),
        "answer": columns.get("answer"),
        "metadata": columns.get("metadata", {}),
    }


def load_scorer(task: str, options: Mapping[str, Any]) -> Scorer:
    """The task's scorer under its own options. Raises RewardError when the package does not know the task."""
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, **{**options, "size": 1})
    except Exception as error:
        raise RewardError(f"reasoning-gym cannot make the task {task!r} with {dict(options)}: {error}") from error
    return dataset.score_answer  # type: ignore[no-any-return]
