"""From a dataset's row to what the model reads, and to JSON values. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import DataError, InvalidConfig, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]


class Renderer:
    """Turns a text or chat messages into (text, token ids).

    With a chat template the template writes every special token and nothing is added to it; without one the text goes
    in as it is, behind the system prompt and an empty line, and the tokenizer adds its own start token, if it has one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, system_prompt: str | None, chat_template: bool, field: str = "data"
    ) -> None:
        if chat_template and not tokenizer.chat_template:
            remedy = f"set {field}.chat_template to false or use an instruction-tuned model"
            raise InvalidConfig(
                [Problem(f"{field}.chat_template", "true", "the model's tokenizer has no chat template", remedy)]
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._chat_template = chat_template
        self._field = field

    def __call__(self, content: str | Messages, where: str) -> tuple[str, list[int]]:
        """`where` names the row in errors. A row's own system message replaces the system prompt."""
        if self._chat_template:
            text = self._through_template(content, where)
            return text, list(self._tokenizer(text, add_special_tokens=False).input_ids)
        if not isinstance(content, str):
            raise DataError(
                f"{where} holds chat messages, but they are not rendered; set {self._field}.chat_template to true"
            )
        text = f"{self._system_prompt}\n\n{content}" if self._system_prompt else content
        return text, list(self._tokenizer(text).input_ids)

    def _through_template(self, content: str | Messages, where: str) -> str:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self._system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything, its own raise_exception included
            raise DataError(f"{where}: the model's chat template refuses it: {error}") from error
        return str(text)


def json_value(value: Any) -> Any:
    """The value as JSON can hold it: times as ISO text, arrays and tuples as lists, keys as text, NaN as null.

    Example: json_value({1: (2, float("nan"))}) == {"1": [2, None]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return json_value(value.tolist())
    return str(value)
