"""The words for each kind of validation error: what is wrong, and what to do. Torch-free."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticUndefined

from grpo_engine.config_paths import Location, children, is_pair

MAX_SHOWN = 200


def show(value: Any) -> str:
    """A value as it stands in YAML, at most 200 characters. Example: show(None) == "null"."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, TypeError):
            text = "a number too long to show" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def show_value(place: Location) -> str:
    """The value at a place; its default when it is not given, "(missing)" when there is none."""
    if place.has_value:
        return show(place.value)
    default = PydanticUndefined if place.field is None else place.field.default
    return "(missing)" if default is PydanticUndefined or place.tags else f"{show(default)} (default)"


def phrase(detail: ErrorDetails, place: Location) -> tuple[str, str]:
    """(message, remedy) of one error. A kind without words of its own keeps pydantic's."""
    if place.field is not None and is_pair(place.field) and detail["type"] != "value_error":
        return "must be two numbers, the low and high end", "write both, such as [0, 1], or leave it out"
    words = _WORDS.get(detail["type"])
    if words:
        return words(detail.get("ctx", {}), place)
    return detail["msg"][:1].lower() + detail["msg"][1:], f"correct {place.path or 'the config'}{_default(place)}"


def _default(place: Location) -> str:
    """ "; the default is 16", empty when the field has none. Factories and models are not shown."""
    default = PydanticUndefined if place.field is None else place.field.default
    if default is PydanticUndefined or isinstance(default, BaseModel):
        return ""
    return f"; the default is {show(default)}"


def _bound(message: str, remedy: str, key: str) -> Callable[[dict[str, Any], Location], tuple[str, str]]:
    def words(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
        bound = f"{ctx[key]:g}" if isinstance(ctx[key], float) else str(ctx[key])
        return message.format(bound), remedy.format(bound) + _default(place)

    return words


def _wanted(message: str, remedy: str) -> Callable[[dict[str, Any], Location], tuple[str, str]]:
    return lambda ctx, place: (message, remedy + _default(place))


def _missing(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    about = place.field.description if place.field is not None else None
    name = place.path.rpartition(".")[2]
    return "is required", f"add {name}" + (f": {about}" if about else "")


_MOVED: dict[str, Callable[[str], str]] = {
    "clip_low": lambda value: f"loss: {{kind: clip, clip_low: {value}}}",
    "clip_high": lambda value: f"loss: {{kind: clip, clip_high: {value}}}",
    "normalize_std": lambda value: f"advantage: {{kind: {'dr_grpo' if value == 'false' else 'grpo'}}}",
    "kl_weight": lambda value: f"kl: {{weight: {value}}}",
    "track_kl": lambda value: f"kl: {{track: {value}}}",
    "max_micro_batch_rows": lambda value: (
        "memory: {max_micro_batch_tokens: 8192}; what bounds it now are tokens, since rows are packed without padding"
    ),
}
"""Fields of a stage that earlier versions had -> what to write today, for the value given."""


def _moved(name: str, place: Location) -> str:
    is_stage = place.model is not None and "memory" in place.model.model_fields
    return _MOVED[name](show(place.value)) if is_stage and name in _MOVED else ""


def _extra(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    name = place.path.rpartition(".")[2]
    if moved := _moved(name, place):
        return "has moved", f"write {moved}"
    allowed = sorted(place.model.model_fields) if place.model is not None else []
    guess = _meant(name, place.model)
    hint = f"did you mean {guess}? " if guess else ""
    return "is not a field", f"{hint}allowed: {', '.join(allowed)}"


def _meant(name: str, model: type[BaseModel] | None) -> str | None:
    """The field that was probably meant: one inside a part (sampling.temperature), else the most similar name."""
    if model is None:
        return None
    for part, child in children(model):
        if name in child.model_fields:
            return f"{part}.{name}"
    close = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.6)
    if close:
        return close[0]
    nested = {field: f"{part}.{field}" for part, child in children(model) for field in child.model_fields}
    close = difflib.get_close_matches(name, nested, n=1, cutoff=0.75)
    return nested[close[0]] if close else None


def _tag_unknown(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    allowed = str(ctx["expected_tags"]).replace("'", "").split(", ")
    close = difflib.get_close_matches(str(ctx["tag"]), allowed, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return "is not known here", f"{hint}use one of {', '.join(allowed)}"


def _tag_missing(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    tag = str(ctx["discriminator"]).strip("'")
    return "is required", f"add {tag}, which says what the other fields mean{_choices(place)}"


def _choices(place: Location) -> str:
    return f": {', '.join(place.tags)}" if place.tags else ""


def _literal(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    allowed = str(ctx["expected"]).replace("'", "")
    return "is not a choice here", f"use {allowed}{_default(place)}"


_FORMS = {
    "^https?://": ("must begin with http:// or https://", "write the whole address, such as http://localhost:8000/v1"),
    "^[a-z]{2}$": ("is no language code", "use two lower-case letters (ISO 639-1), such as en"),
    "^[A-Z][A-Z0-9_]*$": ("does not have the form of a variable's name", "use capitals, digits and _, such as API_KEY"),
    "^[a-zA-Z][a-zA-Z0-9_-]{0,31}$": ("does not have the form of a tag", "use letters, digits, _ and -, as in answer"),
}
"""Pattern of a field -> what it means, where that is not a lower-case name."""


def _pattern(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    if ctx["pattern"] in _FORMS:
        return _FORMS[ctx["pattern"]]
    return "does not have the form of a name", (
        f"use lower-case letters, digits and _, a letter first (pattern {ctx['pattern']})"
    )


_REMEDIES = {
    "hidden_size": "change hidden_size or num_heads so that each head has an even width",
    "buffer_tokens": "lower buffer_tokens or raise max_tokens",
    "minibatches": "lower minibatches or raise prompts_per_step, so that each has a prompt",
    "gated_by": "name another part of this stage; of two parts that gate each other, free one",
    "clip": "write the lowest value first",
    "mtp.depth": "set mtp.depth to at least 1, or rollout.drafts.kind to ngram or none",
    "min_tokens": "lower min_tokens or raise max_tokens",
    "min_match": "lower min_match or raise max_match",
    "speculation.model": "give the folder, or use method ngram",
    "num_steps": "choose a num_steps that minibatches x epochs divides",
    "correction": "set old_logprobs to trainer, or correction.kind to none",
    "correction.level": "set kind to mask, or level to token or sequence",
    "sampling.temperature": "use a temperature above 0, such as 1.0",
    "data.source": "set data.source to reasoning_gym, or use the accuracy reward",
}


def _broken_rule(ctx: dict[str, Any], place: Location) -> tuple[str, str]:
    remedy = next(
        (text for name, text in _REMEDIES.items() if place.path.endswith(name)), "change one of the fields named"
    )
    return str(ctx["error"]), remedy


_MAPPING = _wanted("must be a mapping of fields", "write its fields below it, each as name: value")
_WORDS: dict[str, Callable[[dict[str, Any], Location], tuple[str, str]]] = {
    "missing": _missing,
    "extra_forbidden": _extra,
    "union_tag_invalid": _tag_unknown,
    "union_tag_not_found": _tag_missing,
    "literal_error": _literal,
    "value_error": _broken_rule,
    "string_pattern_mismatch": _pattern,
    "greater_than": _bound("must be above {}", "use a number above {}", "gt"),
    "greater_than_equal": _bound("must be at least {}", "use {} or more", "ge"),
    "less_than": _bound("must be below {}", "use a number below {}", "lt"),
    "less_than_equal": _bound("must be at most {}", "use {} or less", "le"),
    "finite_number": _wanted("must be a finite number", "replace NaN or infinity by a number"),
    "int_type": _wanted("must be a whole number", "use a whole number"),
    "int_parsing": _wanted("must be a whole number", "use a whole number"),
    "int_parsing_size": _wanted("is too large a number", "use a smaller whole number"),
    "int_from_float": _wanted("must be a whole number", "use a number without a fraction"),
    "float_type": _wanted("must be a number", "use a number"),
    "float_parsing": _wanted("must be a number", "use a number"),
    "bool_type": _wanted("must be true or false", "use true or false"),
    "bool_parsing": _wanted("must be true or false", "use true or false"),
    "string_type": _wanted("must be text", "use text; put quotes around it when it looks like a number or date"),
    "string_too_short": _bound("must have at least {} character", "write something", "min_length"),
    "string_too_long": _bound("must have at most {} characters", "shorten it to {} characters", "max_length"),
    "too_short": _bound("must have at least {} item", "add an item", "min_length"),
    "too_long": _bound("must have at most {} items", "keep {} items or fewer", "max_length"),
    "list_type": _wanted("must be a list", "write one item a line, each after a dash"),
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
