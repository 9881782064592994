"""Long worked computations that never repeat themselves and end by themselves; for the multi-token prediction claims.

`go on: 908 1091` is continued by ` 907 2092 906 1093 … 0 1999` and the end token: every number down to 0, each followed
by what it lacks to 999 in one of three forms, 1092, 2092 or 3092 for 907, chosen freely. Any four tokens in a row hold
a number that occurs once. Torch-free.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMBERS = 4000
"""Each is one token."""
LARGEST = 999
FORMS = {1: 6, 2: 3, 3: 1}
"""How often each is chosen, against the others."""
LONG_STARTS = (769, 950)
"""Starts that are measured; their completions have 1,541 to 1,903 tokens, the end token included."""
HIGH_SHARE = 0.5
"""Of the demonstrations: how many start above those; the others start anywhere from the lowest of them on."""


def completion(start: int, rng: random.Random) -> str:
    """Example: completion(1, rng) == " 1 1998 0 2999" """
    forms = rng.choices(list(FORMS), list(FORMS.values()), k=start + 1)
    return "".join(f" {n} {1000 * form + LARGEST - n}" for n, form in zip(range(start, -1, -1), forms, strict=True))


def prompt(start: int) -> str:
    """Example: prompt(907) == "go on: 908 1091" """
    return f"go on: {start + 1} {1000 + LARGEST - (start + 1)}"


def write_rows(path: Path, num_rows: int, seed: int = 0) -> None:
    """Demonstrations as JSONL."""
    rng = random.Random(seed)
    starts = [rng.randrange(LONG_STARTS[rng.random() < HIGH_SHARE], LARGEST) for _ in range(num_rows)]
    rows = [{"prompt": prompt(start), "completion": completion(start, rng)} for start in starts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def long_starts(count: int, seed: int = 1) -> list[int]:
    """Starts of long completions."""
    rng = random.Random(seed)
    return [rng.randint(*LONG_STARTS) for _ in range(count)]


def tokenizer() -> Tokenizer:
    """Byte-level BPE trained on the text, with `<end>` and `<pad>`; every number is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 * NUMBERS, min_frequency=1, special_tokens=["<end>", "<pad>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    found.train_from_iterator([f"go on: {n} {n}" for n in range(NUMBERS)], trainer)
    return found


def repeated_share(ids: Sequence[int], size: int = 4) -> float:
    """Share of the token n-grams that occurred before in the same completion.

    Example: repeated_share([1, 2, 1, 2, 1, 2], 2) == 3 / 5"""
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
