"""The fields of one TRL config while they are read: TRL's defaults where absent, and a line for what has no equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.configs.trl_fields import TrlField, find_field
from grpo_engine.config_words import show


class TrlSource:
    """What a TRL config means. Reading a field that was not given gives TRL's default, not ours."""

    def __init__(self, given: Mapping[str, Any], num_processes: int) -> None:
        self.given = dict(given)
        self.num_processes = num_processes
        self.lines: list[str] = []

    def __getitem__(self, name: str) -> Any:
        field = find_field(name)
        assert field is not None, name
        return _read(self.given[name], field) if name in self.given else field.default

    def number(self, name: str) -> float:
        """Raises ValueError naming a field that holds no number."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} = {show(value)} is not a number")
        return value

    def whole(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise ValueError(f"{name} = {show(value)} is not a whole number")
        return int(value)

    def number_or(self, name: str, fallback: float) -> float:
        """`fallback` where the field is null."""
        return fallback if self[name] is None else self.number(name)

    def words(self, name: str) -> list[str]:
        """A list of names, one alone, or nothing."""
        value = self[name]
        if isinstance(value, str) or value is None:
            return [value] if value else []
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{name} = {show(value)} is not a list of names")
        return list(value)

    def steps(self, name: str, num_steps: int) -> int:
        """A number of steps; below 1 it is a share of all steps."""
        value = self.number(name)
        return max(0, math.ceil(value * num_steps) if 0 < value < 1 else int(value))

    def say(self, name: str, sentence: str) -> None:
        """One line about a field."""
        default = "" if name in self.given else " (TRL's default)"
        self.lines.append(f"{name} = {show(self[name])}{default}: {sentence}.")

    def say_if_given(self, sentence: str, *names: str) -> None:
        for name in names:
            if name in self.given:
                self.say(name, sentence)

    def say_what_has_no_equal(self) -> None:
        """A line for each given field that is never mapped, and for each that TRL does not have."""
        for name, value in self.given.items():
            field = find_field(name)
            if field is None:
                unknown = "TRL 1.16.0 has no such field, so it was left out; check its spelling"
                self.lines.append(f"{name} = {show(value)}: {unknown}.")
            elif field.sentence:
                self.say(name, field.sentence)


def _read(value: Any, field: TrlField) -> Any:
    """YAML reads 1e-6 as text, and command lines write None as text."""
    if not isinstance(value, str) or isinstance(field.default, str):
        return value
    if value.lower() in ("none", "null"):
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value) if any(c in value for c in ".eE") else int(value)
    except ValueError:
        return value
