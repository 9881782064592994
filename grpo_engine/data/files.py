"""Rows of JSONL and Parquet files as prompts. Torch-free.

Every fault is a DataError that names the file, the line or row, the column, what is there, and the remedy.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_engine.config import FileData
from grpo_engine.data.rendering import Messages, Renderer, json_value
from grpo_engine.data.sources import FiniteSource
from grpo_engine.errors import DataError
from grpo_engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]


def open_file(
    config: FileData, tokenizer: PreTrainedTokenizerFast, *, seed: int, demonstrations: bool, field: str
) -> FiniteSource:
    """The file as a source: last `held_out_rows` held out, and with them every earlier row with the same prompt."""
    rows = read_rows(Path(config.path))
    check_rows(config, rows, demonstrations=demonstrations, field=field)
    renderer = Renderer(tokenizer, system_prompt=config.system_prompt, chat_template=config.chat_template, field=field)
    stem = Path(config.path).stem

    def build(row: int, position: int) -> Prompt:
        columns = rows[row]
        where = f"{config.path}, row {row + 1}, column {config.prompt_column!r}"
        text, token_ids = renderer(columns[config.prompt_column], where)
        given: Row = {}
        if config.answer_column in columns:
            given["answer"] = columns[config.answer_column]
        if config.completion_column in columns:
            given["completion"] = columns[config.completion_column]
        return Prompt(f"{stem}/{row}", position, text, token_ids, {**columns, **given})

    first_held = len(rows) - config.held_out_rows
    held_prompts = {_key(row[config.prompt_column]) for row in rows[first_held:]}
    training = [i for i in range(first_held) if _key(rows[i][config.prompt_column]) not in held_prompts]
    if not training:
        raise DataError(
            f"{config.path} has {len(rows)} rows; holding out the last {config.held_out_rows} leaves none with a prompt"
            f" of its own to train on; lower {field}.held_out_rows or add rows"
        )
    return FiniteSource(np.array(training, dtype=np.int64), np.arange(first_held, len(rows)), build, seed)


def read_rows(path: Path) -> list[Row]:
    """All rows as JSON values."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give a .jsonl or .parquet file that the worker can read")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} is neither .jsonl nor .parquet; convert it to one of them")
    rows = reader(path)
    if not rows:
        raise DataError(f"{path} has no rows; give a file with at least one")
    return rows


def check_rows(config: FileData, rows: list[Row], *, demonstrations: bool, field: str) -> None:
    """DataError for the first row without a usable prompt, answer or (for SFT) demonstration."""
    wanted = [(config.prompt_column, f"{field}.prompt_column")]
    if config.answer_column is not None and not demonstrations:
        wanted.append((config.answer_column, f"{field}.answer_column"))
    if demonstrations:
        wanted.append((config.completion_column, f"{field}.completion_column"))
    for number, row in enumerate(rows, start=1):
        for column, setting in wanted:
            if column not in row:
                raise DataError(_missing(config.path, number, column, row, setting))
        _check_prompt(row[config.prompt_column], f"{config.path}, row {number}, column {config.prompt_column!r}")
        if demonstrations:
            where = f"{config.path}, row {number}, column {config.completion_column!r}"
            _check_text(row[config.completion_column], where, "a text")


# ---------------------------------------------------------------- reading
def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                # utf-8-sig: the first line of a file written on Windows may start with a byte order mark.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON ({error}): {_shown(line)}; write one object a line") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} holds {_shown(row)}, not an object; write one object a line")
            rows.append(json_value(row))
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not readable as Parquet ({error}); write it again") from error
    return [json_value(row) for row in table.to_pylist()]


# ---------------------------------------------------------------- checking
def _check_prompt(value: Any, where: str) -> None:
    if isinstance(value, list):
        for index, message in enumerate(value):
            if not (isinstance(message, dict) and isinstance(message.get("role"), str) and message.get("content")):
                raise DataError(
                    f"{where}: message {index + 1} is {_shown(message)}; each message needs a role and a content"
                )
        if value:
            return
    _check_text(value, where, "a text or a list of chat messages")


def _check_text(value: Any, where: str, wanted: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{where} holds {_shown(value)} ({_kind(value)}); it must be {wanted}")
    if not value:
        raise DataError(f"{where} is empty; it must be {wanted}")


def _missing(path: str, number: int, column: str, row: Row, setting: str) -> str:
    there = ", ".join(map(repr, row)) or "none"
    close = difflib.get_close_matches(column, row, n=1)
    hint = f" to {close[0]!r}" if close else " to one of them"
    absent = ", or to null when there are no answers" if setting.endswith("answer_column") else ""
    return f"{path}, row {number} has no column {column!r}; its columns are {there}; set {setting}{hint}{absent}"


def _key(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "bool": "a truth value", "int": "a number", "float": "a number", "dict": "an object"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
