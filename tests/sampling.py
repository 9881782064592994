"""What the samplers of all backends are asked in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_engine.config import SamplingConfig
from grpo_engine.types import SampleRequest
from tests.unit.tiny_models import TOKENIZER


def requests(prompts: Sequence[str], completions: int = 1, seed: int = 0) -> list[SampleRequest]:
    """So many completions of each text, a group and its streams each."""
    return [
        SampleRequest(TOKENIZER(prompt).input_ids, (seed, index, copy), str(index))
        for index, prompt in enumerate(prompts)
        for copy in range(completions)
    ]


def settings(**values: Any) -> SamplingConfig:
    """At most 20 new tokens, where nothing else is said."""
    return SamplingConfig.model_validate({"max_new_tokens": 20, **values})
