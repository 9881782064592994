"""Rollouts a token at a time: log-probabilities and, in PPO, values and advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.errors import NotFound
from app.models import Run
from app.rollouts import files
from app.rollouts.batches import get_batch
from grpo_engine.events import split_nonfinite

TOKEN_NUMBERS = ("values", "returns", "token_advantages")
"""Columns that only PPO fills; files of the first version lack them."""


@dataclass(frozen=True, slots=True)
class TokenDetail:
    position: int
    id: int
    text: str
    logprob: float | None
    """As sampled from, nats."""
    full_logprob: float | None
    """Of the untruncated distribution."""
    ref_logprob: float | None
    kept: list[int] | None
    """Token ids that truncated sampling kept; None without truncation."""
    value: float | None = None
    """PPO: what the critic expected before this token."""
    value_target: float | None = None
    """PPO: the return, what it should have said."""
    advantage: float | None = None
    """PPO: of this token, as trained on; null where the completion's holds for all its tokens."""
    nonfinite: dict[str, str] = field(default_factory=dict)


_TOKEN_COLUMNS = (
    "completion_index", "token_ids", "token_texts", "logprobs", "full_logprobs", "ref_logprobs", "kept_ids",
    *TOKEN_NUMBERS,
)  # fmt: skip


def tokens(
    session: Session, store: ArtifactStore, run: Run, attempt: int, batch: int, index: int, completion: int
) -> list[TokenDetail]:
    """The tokens of one completion with their log-probabilities. Raises NotFound."""
    view = get_batch(session, run, attempt, batch)
    _, rows = files.read_group(store, view.key, index, _TOKEN_COLUMNS)
    for row in rows:
        if row["completion_index"] == completion:
            return [_token(row, position) for position in range(len(row["token_ids"]))]
    raise NotFound(f"Group {index} of batch {batch} has no completion {completion}.")


def _token(row: files.Row, position: int) -> TokenDetail:
    def at(column: str) -> Any:
        values = row.get(column)
        return values[position] if values and position < len(values) else None

    names = {
        "logprob": "logprobs", "full_logprob": "full_logprobs", "ref_logprob": "ref_logprobs", "value": "values",
        "value_target": "returns", "advantage": "token_advantages",
    }  # fmt: skip
    numbers = {name: at(column) for name, column in names.items()}
    kept, kinds = split_nonfinite({name: value for name, value in numbers.items() if value is not None})
    return TokenDetail(
        position=position,
        id=row["token_ids"][position],
        text=at("token_texts") or "",
        logprob=kept.get("logprob"),
        full_logprob=kept.get("full_logprob"),
        ref_logprob=kept.get("ref_logprob"),
        kept=at("kept_ids"),
        value=kept.get("value"),
        value_target=kept.get("value_target"),
        advantage=kept.get("advantage"),
        nonfinite=dict(kinds),
    )
