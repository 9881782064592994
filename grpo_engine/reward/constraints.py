"""Verifiable constraints of a prompt: what its column `constraints` may hold. One class a kind."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from grpo_engine.config_base import Config
from grpo_engine.reward.json_schemas import schema_problem
from grpo_engine.reward.language_consistency import language_problem

Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=100)]


class _Range(Config):
    at_least: int | None = Field(None, ge=0)
    """Fewest that keep the constraint; None = any number."""
    at_most: int | None = Field(None, ge=0)
    """Most that keep it; None = any number."""

    @model_validator(mode="after")
    def _is_a_range(self) -> _Range:
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most or both")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} must not exceed at_most {self.at_most}")
        return self


class Count(_Range):
    """How long the text is. A character of a script without blanks counts as a word; tokens are those sampled."""

    kind: Literal[
        "word_count", "sentence_count", "paragraph_count", "character_count", "token_count", "line_count",
        "heading_count", "bullet_count", "numbered_count", "placeholder_count",
    ]  # fmt: skip


class Keywords(Config):
    """Words or phrases that must stand in the text, each, so often; letter case does not matter."""

    kind: Literal["keywords"]
    words: Words
    at_least: int = Field(1, ge=0)
    at_most: int | None = Field(None, ge=0)


class ForbiddenWords(Config):
    """Words or phrases that must not stand in the text, in any letter case, full width or with invisible marks."""

    kind: Literal["forbidden_words"]
    words: Words


class ForbiddenCharacters(Config):
    """Characters that must not stand in the text; without field: commas."""

    kind: Literal["forbidden_characters"]
    characters: str = Field(",，、،", min_length=1, max_length=100)


class LetterCase(Config):
    """All letters in capitals, or none."""

    kind: Literal["letter_case"]
    case: Literal["upper", "lower"]


class StartsWith(Config):
    """The text begins with these words; letter case does not matter."""

    kind: Literal["starts_with"]
    phrase: str = Field(min_length=1, max_length=1000)


class EndsWith(Config):
    """The text ends with these words and nothing follows but white space; letter case does not matter."""

    kind: Literal["ends_with"]
    phrase: str = Field(min_length=1, max_length=1000)


class Sections(Config):
    """Markdown headings with these titles, in this order."""

    kind: Literal["sections"]
    titles: Words


class Quotation(Config):
    """The whole text stands between double quotation marks."""

    kind: Literal["quotation"]


class Json(Config):
    """The whole text, or the one fenced block that it is, is valid JSON."""

    kind: Literal["json"]


class JsonSchema(Config):
    """The text is JSON, as above, that fits the schema (draft 2020-12)."""

    kind: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    @field_validator("schema_")
    @classmethod
    def _is_supported(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if (problem := schema_problem(schema)) is not None:
            raise ValueError(problem)
        return schema


class Language(Config):
    """At least nine tenths of the words are in this language, ISO 639-1."""

    kind: Literal["language"]
    language: str

    @field_validator("language")
    @classmethod
    def _is_known(cls, language: str) -> str:
        if (problem := language_problem(language)) is not None:
            raise ValueError(problem)
        return language


Constraint = (
    Count | Keywords | ForbiddenWords | ForbiddenCharacters | LetterCase | StartsWith | EndsWith | Sections | Quotation
    | Json | JsonSchema | Language
)  # fmt: skip
MAX_CONSTRAINTS = 50


@cache
def _adapter() -> TypeAdapter[list[Constraint]]:
    one = Annotated[Constraint, Field(discriminator="kind")]
    return TypeAdapter(Annotated[list[one], Field(min_length=1, max_length=MAX_CONSTRAINTS)])


def read_constraints(column: object) -> list[Constraint] | str:
    """The constraints of a prompt's column, or what is wrong with them as a sentence.

    The column is a list of objects, or the same as JSON text; fields that are null count as not given, because a table
    of unlike objects fills them so.
    """
    try:
        rows = json.loads(column) if isinstance(column, str) else column
        return _adapter().validate_python([_without_nulls(row) for row in rows] if isinstance(rows, list) else rows)
    except (ValidationError, ValueError, RecursionError) as error:
        return f"The column constraints is wrong: {_first_problem(error)}."


def _without_nulls(row: object) -> object:
    return {name: value for name, value in row.items() if value is not None} if isinstance(row, dict) else row


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"it is no JSON ({str(error)[:100]})"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = " → ".join(str(place) for place in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
