"""One field of a form: how its value is written for people, and what posted text means. The rest of the way: app.forms.

Text that is no number, or no JSON, stays text, so that the schema itself names the field that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MISSING = object()
"""The field takes its default."""
SWITCH = {"true": True, "false": False}
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""What a text that stands in one line is written with."""
_UNESCAPED = {written[1]: meant for meant, written in ESCAPES.items()}


def is_list_of_parts(schema: Mapping[str, Any]) -> bool:
    """Whether it is a list with a form for each item; words and the two ends of a range stand in one field."""
    return schema.get("type") == "array" and "items" in schema and schema["items"].get("type") != "string"


def kind_of(schema: Mapping[str, Any]) -> str:
    """text, number, checkbox, select, words, lines or json. A switch that may be left open is a select; the two ends
    of a range are words."""
    if "enum" in schema or (schema.get("type") == "boolean" and schema.get("nullable")):
        return "select"
    if schema.get("format") == "lines":
        return "lines"
    kinds = {"integer": "number", "number": "number", "boolean": "checkbox", "array": "words", "object": "json"}
    return kinds.get(schema.get("type", ""), "text")


def choices_of(schema: Mapping[str, Any]) -> list[str]:
    """Of a select."""
    if "enum" in schema:
        return [str(choice) for choice in schema["enum"]]
    return list(SWITCH) if kind_of(schema) == "select" else []


# ---------------------------------------------------------------- from a value to text
def text_of(schema: Mapping[str, Any], value: Any) -> str:
    """What stands in the field: numbers as YAML would write them, words joined, texts one a line, the rest as JSON."""
    kind = kind_of(schema)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower() if value or kind == "select" else ""
    if isinstance(value, list):
        return "\n".join(map(_one_line, value)) if kind == "lines" else ", ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False) if value else ""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _one_line(text: Any) -> str:
    return "".join(ESCAPES.get(character, character) for character in str(text))


# ---------------------------------------------------------------- from text to a value
def leaf_value(schema: Mapping[str, Any], path: str, posted: Mapping[str, str]) -> Any:
    if "const" in schema:
        return schema["const"]
    kind = kind_of(schema)
    if kind == "checkbox":
        return path in posted
    text = posted.get(path)
    if text is None:
        return MISSING
    text = text.replace("\r\n", "\n")
    if kind == "lines":
        return [_meant(line) for line in text.split("\n") if line]
    text = text if kind == "text" else text.strip()
    if kind == "words":
        words = [word for word in (part.strip() for part in text.split(",")) if word]
        return None if not words and schema.get("nullable") else words
    if not text:
        return None if schema.get("nullable") else MISSING if kind != "text" else text
    if kind == "number":
        return _number(text)
    if kind == "json":
        return _json(text)
    return SWITCH.get(text, text) if schema.get("type") == "boolean" else text


def _meant(line: str) -> str:
    """Example: _meant("a" + chr(92) + "n") == "a" and a line break; a backslash before another letter stays."""
    return re.sub(r"\\(.)", lambda found: _UNESCAPED.get(found[1], found[0]), line)


def _number(text: str) -> int | float | str:
    for convert in (int, float):
        try:
            return convert(text.replace("−", "-"))
        except ValueError:
            continue
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
