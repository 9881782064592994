"""What is checked of a page of docs/: its Python examples print what it says, its links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> str:
    """The page's `python` blocks, each at the line where it stands, so that a failure names the page's line."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        if block[1] == "python":
            first = text.count("\n", 0, block.start(2))
            for offset, line in enumerate(block[2].splitlines()):
                lines[first + offset] = line
    return "\n".join(lines)


def wrong_examples(page: Path) -> str:
    """What doctest says of the examples that print something else; empty when all are right."""
    test = doctest.DocTestParser().get_doctest(examples(page), {}, page.name, str(page), 0)
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=output.append)
    return "".join(output)


def blocks(page: Path, language: str) -> list[str]:
    return [block[2] for block in FENCE.finditer(page.read_text()) if block[1] == language]


def broken_links(page: Path) -> list[str]:
    """Links to pages whose heading is not there. Raises FileNotFoundError for a page that is not."""
    found = []
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md)(?:#([\w-]+))?\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor and anchor not in slugs:
            found.append(f"{page.name}: {target}#{anchor}")
    return found
