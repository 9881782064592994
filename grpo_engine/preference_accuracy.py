"""`python -m grpo_engine preference-accuracy`: how often a reward model prefers the better of two answers.

The file has one row a pair, with the columns prompt, chosen and rejected (texts, or lists of chat messages of which the
last is the answer). Printed as JSON: {"model", "version", "num_pairs", "accuracy", "standard_error", "num_ties",
"mean_margin", "num_cut"}. A tie counts half; a coin has 0.5.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_engine.data.files import read_rows
from grpo_engine.errors import DataError, EngineError
from grpo_engine.protocols import TextScorer

Pair = tuple[str, str, str]
"""Question, chosen and rejected answer."""


def preference_accuracy(scorer: TextScorer, pairs: Sequence[Pair]) -> dict[str, float | int]:
    """The figures of the module's docstring. Pairs with a score that is not finite count as lost."""
    chosen = scorer.scores([(question, answer) for question, answer, _ in pairs])
    rejected = scorer.scores([(question, answer) for question, _, answer in pairs])
    margins = [good.score - bad.score for good, bad in zip(chosen, rejected, strict=True)]
    wins = [0.5 if margin == 0 else float(margin > 0) for margin in margins]
    finite = [margin for margin in margins if math.isfinite(margin)]
    accuracy = sum(wins) / len(wins)
    return {
        "num_pairs": len(pairs),
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(pairs)),
        "num_ties": sum(margin == 0 for margin in margins),
        "mean_margin": math.fsum(finite) / max(1, len(finite)),
        "num_cut": sum(good.is_cut or bad.is_cut for good, bad in zip(chosen, rejected, strict=True)),
    }


def pairs_of(path: Path) -> list[Pair]:
    """Raises DataError naming row and column."""
    pairs = []
    for number, row in enumerate(read_rows(path), start=1):
        where = f"{path}, row {number}"
        answers = [_text(row, name, where, last_only=True) for name in ("chosen", "rejected")]
        question = _text(row, "prompt", where, last_only=False) if "prompt" in row else _shared(row)
        pairs.append((question, answers[0], answers[1]))
    return pairs


def _shared(row: dict[str, Any]) -> str:
    """The question that chosen and rejected conversations begin with, where there is no prompt column."""
    turns = row["chosen"]
    return "\n\n".join(str(turn["content"]) for turn in turns[:-1]) if isinstance(turns, list) else ""


def _text(row: dict[str, Any], column: str, where: str, *, last_only: bool) -> str:
    value = row.get(column)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in value)
    ):
        turns = [turn["content"] for turn in value]
        return str(turns[-1]) if last_only else "\n\n".join(turns)
    if isinstance(value, str):
        return value
    raise DataError(f"{where}: column {column!r} holds no text; give prompt, chosen and rejected answer as texts")


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of a sequence-classification checkpoint")
    parser.add_argument("--data", required=True, type=Path, help=".jsonl or .parquet with prompt, chosen and rejected")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute type")
    parser.add_argument("--max-micro-batch-tokens", type=int, default=8192, help="token budget of one forward")


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 measured, 2 refused."""
    import torch

    from grpo_engine.inference.reward_model import RewardModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limit = arguments.max_micro_batch_tokens
    try:
        pairs = pairs_of(arguments.data)
        scorer = RewardModel(arguments.model, dtype=arguments.dtype, max_micro_batch_tokens=limit, device=device)
        figures = preference_accuracy(scorer, pairs)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"model": arguments.model, "version": scorer.version} | figures))
    return 0
