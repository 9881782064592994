"""The preflight's tokenizer against the library it stands in for: same text, same ids."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer

from grpo_engine.checks.tokenizer import folder_tokenizer
from grpo_engine.model.tokenizer import character_tokenizer

TEMPLATE = """{%- if messages[0]['role'] != 'system' -%}
    {{ '<bos>system: be brief; ' }}
{%- endif -%}
{% for message in messages %}
    {%- if message['role'] == 'stop' %}{{ raise_exception('no such role') }}{% endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- generation %}{{ message['role'] + ': ' + message['content'] | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' + ({'a': '<1>'} | tojson) }}{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_chat_templates_render_as_in_transformers(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folder), folder_tokenizer(folder)
    messages = [{"role": "user", "content": " what is 7+5? "}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids


def test_a_template_that_refuses_raises(folder: Path) -> None:
    with pytest.raises(jinja2.TemplateError, match="no such role"):
        folder_tokenizer(folder).apply_chat_template([{"role": "stop", "content": ""}])


def test_a_template_cannot_leave_its_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(jinja2.exceptions.SecurityError):
        folder_tokenizer(folder).apply_chat_template([{"role": "user", "content": ""}])


def test_a_torn_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        folder_tokenizer(folder)


def test_the_template_may_stand_in_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "hi"}]}')
    assert folder_tokenizer(folder).chat_template == "hi"
