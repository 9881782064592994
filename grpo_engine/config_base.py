"""What every class of a config is. Torch-free."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, without unknown fields or numbers that are not finite; a field's docstring is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def check_range(name: str, ends: tuple[float, float] | None) -> None:
    """Raises ValueError for ends in the wrong order."""
    if ends is not None and ends[0] > ends[1]:
        raise ValueError(f"{name} {ends[0]:g}, {ends[1]:g}: the lowest value must not exceed the highest")
