"""Code execution: run the completion's program against its prompt's tests, or inputs and outputs, in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_engine.config_rewards import CodeExecutionReward
from grpo_engine.errors import RewardError
from grpo_engine.reward import (
    extraction,
    program_cases,
    program_recorder,
    program_rewriting,
    program_tests,
    program_verdicts,
    programs,
)
from grpo_engine.reward.metric import Judgement
from grpo_engine.reward.program_cases import Cases, StreamCases, read_cases
from grpo_engine.reward.program_tests import CallCases
from grpo_engine.reward.program_verdicts import judge
from grpo_engine.reward.programs import FoundProgram, defines_name, find_program
from grpo_engine.reward.sandbox import inside
from grpo_engine.reward.sandbox.jobs import CheckJob, Job, Outcome, ProgramJob
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart

_FUTURE = re.compile(r"^from __future__ import [\w, \t]+", re.MULTILINE)


class Runner(Protocol):
    """What runs programs: sandbox.SandboxPool."""

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the order of the jobs."""
        ...


@dataclass
class CodeExecution:
    """Scores a whole batch at once, so that all slots work; equal programs of one prompt run once.

    A prompt without usable tests abstains, as does a program that the sandbox could not run.
    """

    config: CodeExecutionReward
    runner: Runner
    name: str
    weight: float
    version: str

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        different = {id(prompt): prompt for prompt in prompts}  # of a group all completions have the same one
        cases = {key: self._read(prompt) for key, prompt in different.items()}
        found: list[FoundProgram | None] = []
        jobs: list[Job | None] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            given = cases[id(prompt)]
            program = None if isinstance(given, RewardError) else self._find(prompt, completion, given)
            text = None if program is None else program.text
            found.append(program)
            jobs.append(None if text is None or isinstance(given, RewardError) else self._job(text, given))
        outcomes = self._run(jobs)
        return [
            self._part(self._judge(cases[id(prompt)], program, outcomes.get(job) if job else None))
            for prompt, program, job in zip(prompts, found, jobs, strict=True)
        ]

    def _read(self, prompt: Prompt) -> Cases | RewardError:
        try:
            return read_cases(prompt.columns, self.config.cases, first_failure_ends=self.config.credit == "all")
        except RewardError as error:
            return error

    def _find(self, prompt: Prompt, completion: Completion, cases: Cases) -> FoundProgram:
        opened = extraction.opens_thinking(prompt.text)
        defines = cases.defines if isinstance(cases, CallCases) else ""
        return find_program(self.config.extract, completion.text, thinking_opened=opened, defines=defines)

    def _job(self, text: str, cases: Cases) -> Job:
        if isinstance(cases, StreamCases):
            return ProgramJob(text, cases.inputs, self.config.time_limit_s, every_input=self.config.credit == "share")
        return CheckJob(whole_program(text, cases), cases.source, self.config.time_limit_s)

    def _run(self, jobs: Sequence[Job | None]) -> dict[Job, Outcome]:
        different = list(dict.fromkeys(job for job in jobs if job is not None))
        return dict(zip(different, self.runner.run_all(different), strict=True)) if different else {}

    def _judge(self, cases: Cases | RewardError, program: FoundProgram | None, outcome: Outcome | None) -> Judgement:
        if isinstance(cases, RewardError):
            return Judgement(None, f"Nothing to test with: {cases}.")
        assert program is not None
        if outcome is None:
            return Judgement(0.0, f"{program.reason}, so there is nothing to run.", program.span)
        value, explanation = judge(cases, outcome, self.config.credit)
        return Judgement(value, explanation, program.span)

    def _part(self, said: Judgement) -> RewardPart:
        return RewardPart(self.name, said.value, self.weight, said.explanation, said.span, self.version)


def metric(config: CodeExecutionReward, runner: Runner) -> CodeExecution:
    """The metric; `runner` stays its caller's to close."""
    return CodeExecution(config, runner, "code_execution", config.weight, _version())


def whole_program(text: str, cases: CallCases) -> str:
    """What is run: after the imports and helpers of the dataset's prompt, or as the prompt's continuation.

    A completion continues the prompt when it begins indented and does not define what the tests ask for.
    """
    first_line = next(line for line in text.split("\n") if line.strip())
    if cases.opening and first_line[0] in " \t" and not defines_name(text, cases.defines):
        return f"{cases.opening.rstrip()}\n{text}"
    if not cases.preamble:
        return text
    future = _FUTURE.findall(text)  # must stay ahead of everything else
    return "\n".join([*future, cases.preamble + _FUTURE.sub("", text)])


def _version() -> str:
    parts = (extraction, programs, program_cases, program_tests, program_rewriting, program_recorder, program_verdicts)
    sandboxed = [str(path) for path in sorted(Path(inside.__path__[0]).glob("*.py"))]
    own = [__file__, *(str(part.__file__) for part in parts)]
    return version_of("code_execution", module_source(*own, *sandboxed))
