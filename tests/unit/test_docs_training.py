"""The numbers in docs/training.md and its pages are what the code computes."""

import doctest
import re
from pathlib import Path

import pytest
import yaml

from grpo_engine.config import RLStage

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "training.md", *sorted((DOCS / "training").glob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_the_page_prints_what_the_page_says(page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(examples(page), {}, page.name, str(page), 0)
    output: list[str] = []
    results = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(
        test, out=output.append
    )
    assert results.failed == 0, "".join(output)


def test_every_recipe_is_a_valid_stage() -> None:
    blocks = [block[2] for block in FENCE.finditer(PAGES[0].read_text()) if block[1] == "yaml"]
    recipes = [stage for block in blocks for stage in yaml.safe_load(block).values()]
    stages = [RLStage(data={"source": "addition"}, rewards=[{"kind": "accuracy"}], **parts) for parts in recipes]
    assert len(stages) == len(recipes) > 5


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)(?:#([\w-]+))?\)", page.read_text()):
            headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_pages_do_have_examples() -> None:
    counts = {page.name: examples(page).count(">>>") for page in PAGES}
    assert all(counts.values()), f"pages without a checked number: {counts}"


def test_every_python_block_is_an_example_and_none_is_only_shown() -> None:
    for page in PAGES:
        blocks = [block[2] for block in FENCE.finditer(page.read_text()) if block[1] == "python"]
        assert all(block.startswith(">>> ") for block in blocks), page.name
