"""JSONL and Parquet rows, chat rendering, JSON values."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from grpo_engine.config import FileData
from grpo_engine.data.rendering import Renderer, json_value
from grpo_engine.data.sources import open_source
from grpo_engine.errors import DataError, InvalidConfig
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.protocols import PromptSource

TOKENIZER = character_tokenizer()
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(10)]
CHAT = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, *, demonstrations: bool = False, **settings: Any) -> PromptSource:
    config = FileData(path=str(path), **settings)
    return open_source(config, TOKENIZER, seed=0, demonstrations=demonstrations, field="stages.1.data")


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    from_parquet = opened(tmp_path / "rows.parquet")
    from_jsonl = opened(jsonl(tmp_path / "rows.jsonl", ROWS))
    assert from_parquet.size == 10
    assert from_parquet.take(0, 25) == from_jsonl.take(0, 25)


def test_columns_go_with_the_prompt(tmp_path: Path) -> None:
    (prompt, *_) = sorted(opened(jsonl(tmp_path / "rows.jsonl", ROWS)).take(0, 10), key=lambda prompt: prompt.id)
    assert (prompt.id, prompt.text, prompt.token_ids) == ("rows/0", "0+1=", TOKENIZER("0+1=").input_ids)
    assert prompt.columns == {"prompt": "0+1=", "answer": "1", "level": 0}


def test_named_columns_become_answer_and_completion(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": "1+1=", "gold": "2", "demo": "<think></think>2"}])
    source = opened(path, demonstrations=True, prompt_column="q", answer_column="gold", completion_column="demo")
    columns = source.take(0, 1)[0].columns
    assert (columns["answer"], columns["completion"]) == ("2", "<think></think>2")


def test_the_last_rows_are_held_out_and_never_taken(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", ROWS), held_out_rows=3)
    assert source.size == 7
    assert [prompt.text for prompt in source.held_out(256)] == ["7+1=", "8+1=", "9+1="]
    assert {prompt.text for prompt in source.take(0, 70)} == {f"{n}+1=" for n in range(7)}


def test_a_training_row_that_repeats_a_held_out_prompt_is_left_out(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", [*ROWS, ROWS[2]]), held_out_rows=1)
    assert source.size == 9
    assert "2+1=" not in {prompt.text for prompt in source.take(0, 90)}


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "1=", "answer": 1}\n\n   \n{"prompt": "2=", "answer": 2}'
    )
    assert opened(tmp_path / "a.jsonl").size == 2


# ---------------------------------------------------------------- faults
def fault(path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(path, **settings)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no rows"),
        ("\n \n", "has no rows"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": ', "line 2 is not JSON"),
        ('["a", "b"]', 'line 1 holds ["a", "b"], not an object'),
        (
            '{"promt": "a", "answer": "b"}',
            "row 1 has no column 'prompt'; its columns are 'promt', 'answer'; set stages.1",
        ),
        ('{"prompt": "a"}', "no column 'answer'; its columns are 'prompt'; set stages.1.data.answer_column"),
        ('{"prompt": "a", "answer": 1}\n{"answer": 1}', "row 2 has no column 'prompt'"),
        ('{"prompt": 5, "answer": "b"}', "column 'prompt' holds 5 (a number)"),
        ('{"prompt": null, "answer": "b"}', "column 'prompt' holds null (null)"),
        ('{"prompt": "", "answer": "b"}', "column 'prompt' is empty"),
        ('{"prompt": [], "answer": "b"}', "column 'prompt' holds [] (a list)"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "message 1 is"),
    ],
)
def test_a_malformed_file_is_explained(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert expected in fault(tmp_path / "rows.jsonl")


def test_a_missing_file_a_folder_and_another_format_are_explained(tmp_path: Path) -> None:
    assert "does not exist" in fault(tmp_path / "none.jsonl")
    assert "is a folder" in fault(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,2\n")
    assert "neither .jsonl nor .parquet" in fault(tmp_path / "rows.csv")


def test_bytes_that_are_no_text_or_no_parquet_are_explained(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "line 1 is not UTF-8" in fault(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    assert "not readable as Parquet" in fault(tmp_path / "a.parquet")


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    assert "lower stages.1.data.held_out_rows" in fault(jsonl(tmp_path / "a.jsonl", ROWS), held_out_rows=10)
    assert "lower stages.1.data.held_out_rows" in fault(jsonl(tmp_path / "a.jsonl", ROWS), held_out_rows=99)


def test_sft_needs_a_completion_and_rl_does_not(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    assert "no column 'completion'" in fault(path, demonstrations=True)
    assert opened(path).size == 10
    empty = jsonl(tmp_path / "b.jsonl", [{**ROWS[0], "completion": ""}])
    assert "column 'completion' is empty" in fault(empty, demonstrations=True)


def test_sft_needs_no_answer(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "1=", "completion": "1"}])
    columns = opened(path, demonstrations=True).take(0, 1)[0].columns
    assert columns == {"prompt": "1=", "completion": "1"}


# ---------------------------------------------------------------- rendering
def chat_renderer(system_prompt: str | None = None) -> Renderer:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    return Renderer(tokenizer, system_prompt=system_prompt, chat_template=True)


def test_a_text_becomes_the_users_message() -> None:
    text, ids = chat_renderer("be brief")("1+1=", "row 1")
    assert text == "(system)be brief(user)1+1=(assistant)"
    assert ids == TOKENIZER(text).input_ids


def test_chat_messages_keep_their_own_system_message() -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert chat_renderer("be brief")(messages, "row 1")[0] == "(system)own(user)hi(assistant)"
    assert chat_renderer("be brief")(messages[1:], "row 1")[0] == "(system)be brief(user)hi(assistant)"


def test_chat_messages_without_rendering_are_refused_by_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}])
    with pytest.raises(DataError, match=r"row 1.*set stages\.1\.data\.chat_template to true"):
        opened(path).take(0, 1)


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        opened(jsonl(tmp_path / "a.jsonl", ROWS), chat_template=True)
    assert caught.value.problems[0].field == "stages.1.data.chat_template"


def test_a_template_that_refuses_is_a_data_error() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"row 4.*roles must alternate"):
        Renderer(tokenizer, system_prompt=None, chat_template=True)("hi", "row 4")


def test_values_become_json() -> None:
    value = {1: (2, np.float64("nan")), "when": datetime.date(2026, 1, 2), "array": np.arange(2), "b": b"x", "t": True}
    expected = {"1": [2, None], "when": "2026-01-02", "array": [0, 1], "b": "b'x'", "t": True}
    assert json_value(value) == expected
    assert json.loads(json.dumps(json_value(value), allow_nan=False)) == expected
