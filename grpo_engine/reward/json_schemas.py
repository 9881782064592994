"""JSON held against a schema in bounded time: no references to elsewhere, no recursion, no patterns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

MAX_JSON_CHARACTERS = 10_000
"""Longer JSON does not fit any schema; bounds the time of a validation."""
_MAX_NODES = 300
# Keywords whose time a hostile text decides, or that look elsewhere.
_UNSUPPORTED = ("pattern", "patternProperties", "$dynamicRef", "$recursiveRef", "unevaluatedItems",
                "unevaluatedProperties")  # fmt: skip


class _Unsupported(ValueError):
    """A schema that is not validated here; the message says why."""


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why texts cannot be held against `schema`, without full stop; None when they can."""
    try:
        _validator(json.dumps(schema, sort_keys=True))
    except _Unsupported as error:
        return str(error)
    except (TypeError, ValueError, RecursionError) as error:
        return f"the schema is no JSON: {str(error)[:100]}"
    return None


def find_misfit(value: object, schema: dict[str, Any]) -> str:
    """The first thing about `value` that does not fit, without full stop; empty when it fits.

    The schema must have no problem, and `value` must come from at most MAX_JSON_CHARACTERS of JSON.
    """
    error = next(_validator(json.dumps(schema, sort_keys=True)).iter_errors(value), None)
    if error is None:
        return ""
    where = "/".join(str(place) for place in error.absolute_path)
    return f"{where or 'the value'}: {error.message}"[:200]


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import extend

    root = json.loads(schema_text)
    budget = [_MAX_NODES]
    schema = _inlined(root, root, budget)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise _Unsupported(f"the schema is wrong: {error.message[:200]}") from error
    fast = extend(Draft202012Validator, {"uniqueItems": _unique_items})
    return fast(schema)


def _inlined(node: Any, root: Any, budget: list[int]) -> Any:
    """`node` with every reference replaced by what it refers to. A recursive schema runs out of its budget."""
    if isinstance(node, list):
        return [_inlined(item, root, budget) for item in node]
    if not isinstance(node, dict):
        return node
    budget[0] -= 1
    if budget[0] < 0:
        raise _Unsupported(f"the schema is recursive or has more than {_MAX_NODES} parts; make it flatter")
    for keyword in _UNSUPPORTED:
        if keyword in node:
            raise _Unsupported(f"the schema's keyword {keyword!r} is not supported; use enum, type or length limits")
    reference = node.get("$ref")
    rest = {key: value for key, value in node.items() if key not in ("$ref", "$defs", "definitions")}
    inlined = {key: _inlined_value(key, value, root, budget) for key, value in rest.items()}
    if reference is None:
        return inlined
    return {**inlined, "allOf": [*inlined.get("allOf", []), _inlined(_target(reference, root), root, budget)]}


def _inlined_value(key: str, value: Any, root: Any, budget: list[int]) -> Any:
    """Names of properties are no keywords, and constants are no schemas."""
    if key in ("properties", "dependentSchemas") and isinstance(value, dict):
        return {name: _inlined(schema, root, budget) for name, schema in value.items()}
    return value if key in ("const", "enum", "default", "examples") else _inlined(value, root, budget)


def _target(reference: object, root: Any) -> Any:
    """What `#/a/b` refers to."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _Unsupported(f"the schema refers to {str(reference)[:80]!r}; only references such as #/$defs/item are")
    node = root
    for step in reference[2:].split("/") if reference != "#" else []:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or step not in node:
            raise _Unsupported(f"the schema refers to {reference[:80]!r}, which it does not have")
        node = node[step]
    return node


def _unique_items(validator: Any, wanted: object, items: object, _: object) -> Iterator[Any]:
    """In one pass; the library compares each with each where items cannot be sorted."""
    from jsonschema import ValidationError

    if wanted and isinstance(items, list):
        texts = [json.dumps(item, sort_keys=True) for item in items]
        if len(set(texts)) < len(texts):
            yield ValidationError("an item stands there twice")
