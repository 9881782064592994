"""Long worked computations that never repeat themselves and end by themselves; for the multi-token prediction claims.

`from 907:` is answered by ` 907 gives 3092; 906 leaves 3093; … 500 makes 3499;` and the end token: every number down to
the next multiple of 500, a word chosen freely, and what the number lacks to 3,999. A line is four tokens, and any four
tokens in a row hold a number that occurs once. Most demonstrations start near their end, so that training is on short
rows for the most part. Torch-free.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK = 500
"""Counting ends at multiples of it."""
NUMBERS = 4000
"""Starts and what they lack lie below; each number is one token."""
TOKENS_PER_LINE = 4
WORDS = {"gives": 8, "leaves": 5, "makes": 4, "yields": 3, "has": 2, "means": 2, "shows": 1, "wants": 1}
"""How often each is chosen, against the others."""
LONG_LINES = (385, BLOCK)
"""Lines of a completion of 1,541 to 2,001 tokens, the end token included."""
LONG_SHARE, SHORT_LINES = 0.25, 50
"""Of the demonstrations: how many have up to BLOCK lines; the others have up to SHORT_LINES."""


def completion(start: int, rng: random.Random) -> str:
    """Example: completion(501, rng) == " 501 makes 3498; 500 gives 3499;" """
    numbers = range(start, start // BLOCK * BLOCK - 1, -1)
    words = rng.choices(list(WORDS), list(WORDS.values()), k=len(numbers))
    return "".join(f" {n} {word} {NUMBERS - 1 - n};" for n, word in zip(numbers, words, strict=True))


def prompt(start: int) -> str:
    return f"from {start}:"


def write_rows(path: Path, num_rows: int, seed: int = 0) -> None:
    """Demonstrations as JSONL, of all blocks."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        most = BLOCK if rng.random() < LONG_SHARE else SHORT_LINES
        start = rng.randrange(NUMBERS // BLOCK) * BLOCK + rng.randrange(most)
        rows.append({"prompt": prompt(start), "completion": completion(start, rng)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def long_starts(count: int, seed: int = 1) -> list[int]:
    """Starts whose completions have LONG_LINES lines, block after block."""
    rng = random.Random(seed)
    return [index * BLOCK % NUMBERS + rng.randint(LONG_LINES[0] - 1, LONG_LINES[1] - 1) for index in range(count)]


def tokenizer() -> Tokenizer:
    """Byte-level BPE trained on the text, with `<end>` and `<pad>`; every number and word is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 * NUMBERS, min_frequency=1, special_tokens=["<end>", "<pad>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    words = " ".join(["from", *WORDS, *(f"{word};" for word in WORDS)])
    found.train_from_iterator([words, *(f"from {n}: {n};" for n in range(NUMBERS))], trainer)
    return found


def repeated_share(ids: Sequence[int], size: int = 4) -> float:
    """Share of the token n-grams that occurred before in the same completion.

    Example: repeated_share([1, 2, 1, 2, 1, 2], 2) == 3 / 5"""
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
