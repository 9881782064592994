"""Long worked computations that never repeat themselves and end by themselves; for the multi-token prediction claims.

`from 907:` is answered by ` 907 gives 16; 906 leaves 2236; … 512 makes 192;` and the end token: every number down to
the next multiple of 512, a word chosen freely, and the number's square modulo 4,093. A line is four tokens, and any
four tokens in a row hold a number that occurs once. Torch-free.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK, NUM_BLOCKS = 512, 2
"""Counting ends at multiples of BLOCK; starts lie below BLOCK * NUM_BLOCKS."""
MODULUS = 4093
NUMBERS = 4096
"""All of them are one token each."""
TOKENS_PER_LINE = 4
WORDS = {"gives": 8, "leaves": 5, "makes": 4, "yields": 3, "has": 2, "means": 2, "shows": 1, "wants": 1}
"""How often each is chosen, against the others."""
LONG_LINES = (385, 511)
"""Lines of a completion of 1,541 to 2,045 tokens, the end token included."""


def completion(start: int, rng: random.Random) -> str:
    """Example: completion(513, rng) == " 513 makes 1217; 512 gives 192;" """
    last = start // BLOCK * BLOCK
    words = rng.choices(list(WORDS), list(WORDS.values()), k=start - last + 1)
    numbers = range(start, last - 1, -1)
    return "".join(f" {n} {word} {n * n % MODULUS};" for n, word in zip(numbers, words, strict=True))


def prompt(start: int) -> str:
    return f"from {start}:"


def write_rows(path: Path, num_rows: int, seed: int = 0) -> None:
    """Demonstrations as JSONL, from any start."""
    rng = random.Random(seed)
    starts = [rng.randrange(BLOCK * NUM_BLOCKS) for _ in range(num_rows)]
    rows = [{"prompt": prompt(start), "completion": completion(start, rng)} for start in starts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def long_starts(count: int, seed: int = 1) -> list[int]:
    """Starts whose completions have LONG_LINES lines, block after block."""
    rng = random.Random(seed)
    return [index % NUM_BLOCKS * BLOCK + rng.randint(LONG_LINES[0] - 1, LONG_LINES[1] - 1) for index in range(count)]


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
    words = " ".join(["from", "from:", *WORDS, *(f"{word};" for word in WORDS)])
    found.train_from_iterator([words, *(f"from {n}: {n};" for n in range(NUMBERS))], trainer)
    return found


def repeated_share(ids: Sequence[int], size: int = 4) -> float:
    """Share of the token n-grams that occurred before in the same completion.

    Example: repeated_share([1, 2, 1, 2, 1, 2], 2) == 3 / 5"""
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
