"""Where a validation error lies: its dotted path without union tags, its value, and the model around it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from grpo_engine.config import RunConfig

_PATH_IN_TEXT = re.compile(r"[a-z_]+(?:\.(?:[a-z_]+|\d+))*")


@dataclass(frozen=True, slots=True)
class Location:
    """Example: path "stages.1.group_size", model RLStage, field its FieldInfo."""

    path: str
    model: type[BaseModel] | None
    """The model whose field it is, or that stands at the path itself."""
    field: FieldInfo | None
    value: Any = None
    has_value: bool = True
    tags: tuple[str, ...] = ()
    """Tags of the discriminated union that stands there."""


def locate(detail: ErrorDetails, data: Any) -> Location:
    """The place of one pydantic error in the data that was validated."""
    path, kind_there, model, field = _walk(detail["loc"])
    kind = detail["type"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path.append(str(detail["ctx"]["discriminator"]).strip("'"))
    elif kind == "value_error" and model is not None:
        inner = _field_named(str(detail["ctx"]["error"]), model)
        path, field = path + inner, _field_at(model, inner) or field
    value, has_value = _look_up(data, path)
    if kind == "missing" and not (field is not None and is_pair(field)):
        has_value = False
    dotted, tags = ".".join(str(part) for part in path), tuple(union_members(kind_there))
    return Location(dotted, model, field, value, has_value, tags)


def _walk(loc: tuple[int | str, ...]) -> tuple[list[int | str], Any, type[BaseModel] | None, FieldInfo | None]:
    """Follow the schema along `loc`, dropping the tag that pydantic adds for each discriminated union.

    Returns the path, the type that stands there, the model around it and its field."""
    path: list[int | str] = []
    kind: Any = RunConfig
    model: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    for part in loc:
        members = union_members(kind)
        if members and part in members:
            kind = model = members[str(part)]
            continue
        if field is not None and is_pair(field):
            break  # what is wrong with one end is told of both
        path.append(part)
        if is_model(kind):
            model, field = kind, kind.model_fields.get(str(part))
            kind = _given(field.annotation) if field else None
        elif get_origin(kind) is list:
            kind = get_args(kind)[0]
        else:
            kind = None
        if is_model(kind):
            model = kind
    return path, kind, model, field


def _given(kind: Any) -> Any:
    """X of `X | None` where X is a model; anything else as it is."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    models = [member for member in members if is_model(member)]
    return models[0] if len(models) == 1 and len(members) == 2 else kind


def is_pair(field: FieldInfo) -> bool:
    """Whether the field holds two ends of a range, or None."""
    return any(get_origin(kind) is tuple for kind in (field.annotation, *get_args(field.annotation)))


def is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def union_members(kind: Any) -> dict[str, type[BaseModel]]:
    """Tag -> model of a discriminated union; empty for any other type."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) not in (Union, UnionType):
        return {}
    models = [member for member in get_args(kind) if is_model(member)]
    return {str(member.model_fields[tag].default): member for member in models for tag in _tags(member)}


def _tags(model: type[BaseModel]) -> list[str]:
    return [name for name in ("source", "kind", "backend") if name in model.model_fields]


def children(model: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Fields of `model` that hold a model, those of one fixed type first, then every form of a union."""
    fields = [(name, _given(field.annotation)) for name, field in model.model_fields.items()]
    fixed = [(name, kind) for name, kind in fields if is_model(kind)]
    return fixed + [(name, form) for name, kind in fields for form in union_members(kind).values()]


def _field_named(message: str, model: type[BaseModel]) -> list[int | str]:
    """The first path in a validator's message that is a field of `model`, such as sampling.temperature or
    rewards.1.gated_by."""
    for match in _PATH_IN_TEXT.finditer(message):
        parts: list[int | str] = [int(part) if part.isdigit() else part for part in match.group().split(".")]
        if len(parts) > 2 and isinstance(parts[1], int) and parts[0] in model.model_fields:
            return parts
        if parts[0] in model.model_fields and (len(parts) == 2 or _field_at(model, parts) is not None):
            return parts
    return []


def _field_at(model: type[BaseModel], parts: list[Any]) -> FieldInfo | None:
    kind: Any = model
    field: FieldInfo | None = None
    for part in parts:
        if not is_model(kind) or part not in kind.model_fields:
            return None
        field = kind.model_fields[part]
        kind = _given(field.annotation)
    return field


def _look_up(data: Any, path: list[int | str]) -> tuple[Any, bool]:
    for part in path:
        known = part in data if isinstance(data, Mapping) else isinstance(data, list | tuple) and isinstance(part, int)
        if not known:
            return None, False
        data = data[part]
    return data, True
