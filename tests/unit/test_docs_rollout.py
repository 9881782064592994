"""The numbers and configurations in docs/rollout.md are what the code computes and accepts; its table is measured."""

import json
import re

import pytest
import yaml

from grpo_engine.config import RunConfig
from grpo_engine.diagnostics.catalogue import METRICS, info
from tests.doc_examples import DOCS, blocks, broken_links, wrong_examples

PAGE = DOCS / "rollout.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "rollout.json"
RUN = {
    "name": "a run", "model": {"source": "tiny_llama"},
    "stages": [{"kind": "rl", "data": {"source": "addition"}, "rewards": [{"kind": "accuracy"}]}],
}  # fmt: skip


def test_every_example_of_the_page_prints_what_the_page_says() -> None:
    assert wrong_examples(PAGE) == ""


def test_every_configuration_is_valid() -> None:
    shown = [parts for block in blocks(PAGE, "yaml") for parts in yaml.safe_load(block).values()]
    configs = [RunConfig.model_validate({**RUN, **parts}) for parts in shown]
    assert {config.rollout.backend for config in configs} == {"torch", "vllm", "vllm_server"}


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    assert broken_links(PAGE) == []


def test_every_metric_that_the_page_names_is_explained_in_the_catalogue() -> None:
    named = re.findall(r"`((?:rollout|mtp|groups)/\w+)(?:<\w>)?`", PAGE.read_text())
    assert len(set(named)) > 10
    unknown = [
        name for name in named if name not in METRICS and info(f"{name}1").description == "Not in the catalogue."
    ]
    assert unknown == []


def table() -> dict[str, list[str]]:
    """Claim -> its cells: work, peer, ours, the peer's, ratio, goal."""
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text().partition("## Measured")[2], re.MULTILINE)
    return {claim: [cell.strip() for cell in rest.split("|")] for claim, rest in lines}


def test_the_table_shows_what_was_measured_and_a_dash_where_nothing_was() -> None:
    rows = {row["claim"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    assert len(table()) >= 12
    for claim, (_, _, ours, _, ratio, _) in table().items():
        measured = rows.get(claim)
        assert (ours == "–") == (measured is None), claim
        if measured is None or measured["ratio"] is None:
            assert ratio == "–", claim
        else:
            assert float(ratio) == pytest.approx(measured["ratio"], rel=0.01), claim
