"""The numbers in docs/training.md and its pages are what the code computes."""

from pathlib import Path

import pytest
import yaml

from grpo_engine.config import RLStage
from tests.doc_examples import DOCS, blocks, broken_links, examples, wrong_examples

PAGES = [DOCS / "training.md", *sorted((DOCS / "training").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_the_page_prints_what_the_page_says(page: Path) -> None:
    assert wrong_examples(page) == ""


def test_every_recipe_is_a_valid_stage() -> None:
    recipes = [stage for block in blocks(PAGES[0], "yaml") for stage in yaml.safe_load(block).values()]
    stages = [RLStage(data={"source": "addition"}, rewards=[{"kind": "accuracy"}], **parts) for parts in recipes]
    assert len(stages) == len(recipes) > 5


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []


def test_the_pages_do_have_examples() -> None:
    counts = {page.name: examples(page).count(">>>") for page in PAGES}
    assert all(counts.values()), f"pages without a checked number: {counts}"


def test_every_python_block_is_an_example_and_none_is_only_shown() -> None:
    for page in PAGES:
        assert all(block.startswith(">>> ") for block in blocks(page, "python")), page.name
