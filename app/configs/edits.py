"""Changed settings by dotted path, as a clone or fork takes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from app.errors import Invalid
from grpo_engine.errors import Problem


def apply_changes(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `data` with each path set to its value. Raises Invalid for a path that leads nowhere.

    Example: apply_changes({"a": [{"b": 1}]}, {"a.0.b": 2}) == {"a": [{"b": 2}]}"""
    edited: dict[str, Any] = copy.deepcopy(dict(data))
    problems = [problem for path, value in changes.items() if (problem := _set(edited, path, value))]
    if problems:
        raise Invalid.of(problems)
    return edited


def _set(data: dict[str, Any], path: str, value: Any) -> Problem | None:
    *parents, last = path.split(".")
    place: Any = data
    for part in parents:
        place = _child(place, part)
    if isinstance(place, list) and last.isdecimal() and int(last) < len(place):
        place[int(last)] = value
    elif isinstance(place, dict) and last:
        place[last] = value
    else:
        return Problem(path, str(value)[:200], "is no setting of this config", "use a path such as stages.1.num_steps")
    return None


def _child(place: Any, part: str) -> Any:
    if isinstance(place, list):
        return place[int(part)] if part.isdecimal() and int(part) < len(place) else None
    return place.get(part) if isinstance(place, dict) else None
