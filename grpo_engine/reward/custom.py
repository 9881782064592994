"""Custom: a user's own reward function, given as source text, with TRL's signature."""

from __future__ import annotations

import copy
import inspect
import linecache
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from grpo_engine.errors import RewardError
from grpo_engine.reward.versions import version_of
from grpo_engine.types import Completion, Prompt, RewardPart

Function = Callable[..., Any]


class Custom:
    """Calls `f(completions, **columns) -> list[float | None]` once for all completions.

    The function gets `completions` (text), `prompts` (text), `completion_ids` and every dataset column, each a list
    with one item a completion; a function without **kwargs gets only what it names. None or NaN abstains. An exception,
    or a list of the wrong length, makes every completion of the call abstain with the error as its explanation.

    Raises:
        RewardError: the source has a syntax error, fails to run, or does not hold exactly one candidate function.
    """

    def __init__(self, name: str, weight: float, source: str) -> None:
        self.name = name
        self.weight = weight
        self.version = version_of(name, source.encode())
        self._function = load_function(name, source)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        try:
            returned = self._function(**self._arguments(prompts, completions))
            values = list(returned)
        except (Exception, SystemExit) as error:
            return self._all_abstain(completions, f"{self.name} failed: {_describe(error, self.name)}")
        if len(values) != len(completions):
            fault = f"{self.name} returned {len(values)} values for {len(completions)} completions"
            return self._all_abstain(completions, fault)
        return [self._part(*_as_value(self.name, value)) for value in values]

    def _arguments(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> dict[str, Any]:
        names = sorted({column for prompt in prompts for column in prompt.columns})
        arguments: dict[str, Any] = {name: [_owned(prompt.columns.get(name)) for prompt in prompts] for name in names}
        arguments["prompts"] = [prompt.text for prompt in prompts]
        arguments["completions"] = [completion.text for completion in completions]
        arguments["completion_ids"] = [list(completion.token_ids) for completion in completions]
        parameters = inspect.signature(self._function).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}

    def _all_abstain(self, completions: Sequence[Completion], fault: str) -> list[RewardPart]:
        return [self._part(None, f"{fault}.") for _ in completions]

    def _part(self, value: float | None, explanation: str) -> RewardPart:
        return RewardPart(self.name, value, self.weight, explanation, None, self.version)


def load_function(name: str, source: str) -> Function:
    """The function named `reward`, else the only public one that the source defines. Raises RewardError."""
    filename = f"<reward {name}>"
    module = ModuleType(f"cohort_reward_{name}")
    # Tracebacks of the user's code then show its lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
    except SyntaxError as error:
        raise RewardError(f"reward {name!r}: line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r} fails when it is loaded: {_describe(error, name)}") from error
    return _choose(name, module)


def _choose(name: str, module: ModuleType) -> Function:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if "reward" in own:
        own = {"reward": own["reward"]}
    if len(own) != 1:
        found = ", ".join(sorted(own)) or "none"
        raise RewardError(f"reward {name!r} must define one function, or one named 'reward'; found: {found}")
    [function] = own.values()
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {name!r}: {function.__name__} is async; define it with plain def")
    return function


def _owned(value: Any) -> Any:
    """A copy that user code may change without changing what is recorded."""
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def _as_value(name: str, value: Any) -> tuple[float | None, str]:
    if value is None:
        return None, f"{name} abstained."
    if isinstance(value, str | bytes):
        return None, f"{name} returned text instead of a number."
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"{name} returned a {type(value).__name__} instead of a number."
    if math.isnan(number):
        return None, f"{name} abstained (NaN)."
    if math.isinf(number):
        return None, f"{name} returned an infinite number."
    return number, f"{name} returned {number:.4g}."


def _describe(error: BaseException, name: str) -> str:
    """Kind and message of an error, with the last line of the user's source that it passed."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<reward {name}>":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" (line {line})" if line else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
