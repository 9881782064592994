"""Tokens are named when a name is asked for.

vLLM's API server decodes every sampled token to a text of its own, for the `tokens` of an answer's log-probabilities.
We ask for ids and read none of these texts, which are a third of that server's time. Without them vLLM decodes a token
when it writes an answer that names it (`_get_decoded_token`), so that other clients get what they ask for.
"""

from __future__ import annotations

from typing import Any


def name_tokens_late() -> None:
    """From now on, in this process."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    made = LogprobsProcessor.from_new_request

    def without_names(tokenizer: Any, request: Any) -> Any:
        return made(None, request)

    LogprobsProcessor.from_new_request = staticmethod(without_names)
