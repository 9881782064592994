"""A model folder's tokenizer without transformers: text to ids, and chat templates in a sandbox. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from grpo_engine.model.tokenizer import characters

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Encoded:
    input_ids: list[int]


class LightTokenizer:
    """What prompt sources need of a tokenizer: a call, `chat_template` and `apply_chat_template`."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> Encoded:
        return Encoded(list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def unknown_share(self, token_ids: Sequence[int]) -> float:
        """Share of ids that stand for text outside the vocabulary."""
        unknown = self._tokenizer.token_to_id(self._special_tokens.get("unk_token", "<unk>"))
        return 0.0 if unknown is None or not token_ids else token_ids.count(unknown) / len(token_ids)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, rendered in a sandbox. Raises jinja2.TemplateError."""
        assert not tokenize, "the preflight renders text only"
        template = _environment().from_string(self.chat_template or "")
        return template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )  # fmt: skip


def character_tokenizer() -> LightTokenizer:
    """The tokenizer of tiny_llama models."""
    return LightTokenizer(characters(), None, {"unk_token": "<unk>", "eos_token": "<eos>"})


def stand_in_tokenizer() -> LightTokenizer:
    """For a model whose own tokenizer cannot be read: lets data be opened, its ids mean nothing."""
    return LightTokenizer(characters(), "{{ messages[-1].content }}", {})


def folder_tokenizer(folder: Path) -> LightTokenizer:
    """The tokenizer of a model folder. Raises ValueError with a sentence when its files cannot be read."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error
    settings = _json(folder / "tokenizer_config.json") | _json(folder / "special_tokens_map.json")
    special = {name: _token_text(settings[name]) for name in _SPECIAL if settings.get(name)}
    return LightTokenizer(tokenizer, _chat_template(folder, settings), special)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stated = settings.get("chat_template")
    if isinstance(stated, list):  # several named templates, one of them the default
        stated = next((entry["template"] for entry in stated if entry.get("name") == "default"), None)
    return stated if isinstance(stated, str) else None


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for other uses; here it is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for, as transformers sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
