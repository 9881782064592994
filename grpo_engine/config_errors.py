"""From YAML text or a mapping to a RunConfig; from every fault to a Problem that a person can act on. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from grpo_engine.config import RunConfig
from grpo_engine.config_paths import locate
from grpo_engine.config_words import phrase, show, show_value
from grpo_engine.errors import InvalidConfig, Problem

MAX_CHARACTERS = 100_000
"""Longest config: the YAML reader is slow, and what a person writes is a tenth of this."""
MAX_VALUES = 20_000
"""Values in a config after its YAML aliases are expanded."""


def load_config(given: str | Mapping[str, Any], source: str = "config") -> RunConfig:
    """The checked config of YAML text (JSON is YAML) or of a mapping. `source` names the text in messages.

    Raises InvalidConfig with every problem found.
    """
    data = read_yaml(given, source) if isinstance(given, str) else given
    if not isinstance(data, Mapping):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise _refused(show(data), f"{source} holds {kind}, not fields", "write fields such as name, model and stages")
    if sum(1 for _ in _values(data)) > MAX_VALUES:
        raise _refused("", f"{source} has more than {MAX_VALUES} values", "shorten lists and aliases")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise InvalidConfig(problems_of(error, data)) from error


def problems_of(error: ValidationError, data: Any) -> list[Problem]:
    """Every fault that pydantic found in `data`, in its order, with clean paths such as stages.1.group_size."""
    return [_problem(detail, data) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, data: Any) -> Problem:
    place = locate(detail, data)
    message, remedy = phrase(detail, place)
    return Problem(place.path, show_value(place), message, remedy)


# ---------------------------------------------------------------- YAML
class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice in one mapping."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice, first in line {seen[key.value]}", key.start_mark
                )
            seen[key.value] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(text: str, source: str = "config") -> Any:
    """The value of YAML text. Raises InvalidConfig with the line of a syntax error or of a key given twice."""
    if len(text) > MAX_CHARACTERS:
        raise _refused("", f"{source} is longer than {MAX_CHARACTERS} characters", "shorten it")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        lines = text.splitlines()
        shown = lines[line - 1].strip() if line <= len(lines) else ""
        what = error.problem or error.context or "syntax error"
        remedy = "keep one of them" if "given twice" in what else "correct the YAML there (indentation, quotes, colons)"
        raise _refused(show(shown), f"{source}, line {line}: {what}", remedy) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "nested too deeply"
        raise _refused("", f"{source} cannot be read: {reason}", "correct the YAML") from error


def _values(data: Any) -> Iterator[Any]:
    """Every value inside `data`, aliases expanded, stopping soon after MAX_VALUES."""
    waiting, num_seen = [data], 0
    while waiting and num_seen <= MAX_VALUES:
        value = waiting.pop()
        num_seen += 1
        yield value
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def _refused(value: str, message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([Problem("", value, message, remedy)])
