"""docs/rewards.md names every kind of reward, its configurations are valid and its table is measured."""

from __future__ import annotations

import json
import re
from typing import get_args

import yaml

from grpo_engine.config import RewardConfig, RunConfig
from grpo_engine.diagnostics.catalogue import METRICS
from grpo_engine.reward.behaviours import BEHAVIOURS
from tests.doc_examples import DOCS, blocks, broken_links, wrong_examples

PAGE = DOCS / "rewards.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "rewards.json"


def kinds() -> set[str]:
    parts = get_args(get_args(RewardConfig)[0])
    return {part.model_fields["kind"].default for part in parts}


def test_every_kind_of_reward_is_explained() -> None:
    text = PAGE.read_text()
    table = set(re.findall(r"^\| `(\w+)` \|", text.partition("## The metrics")[2].partition("###")[0], re.MULTILINE))
    learned = {"bertscore", "reward_model", "judge"}
    assert table | learned | {"custom"} == kinds()
    assert (table | learned) - {"gym"} == set(re.findall(r"^### (\w+)$", text, re.MULTILINE))


def test_every_example_and_configuration_of_the_page_holds() -> None:
    assert wrong_examples(PAGE) == ""
    assert broken_links(PAGE) == []
    for block in blocks(PAGE, "yaml"):
        run = RunConfig.model_validate({"name": "a", "model": {"source": "tiny_llama"}, **yaml.safe_load(block)})
        assert len(run.stages) == 1


def test_every_metric_that_the_page_names_is_in_the_catalogue() -> None:
    named = set(re.findall(r"`(reward/\w+)`", PAGE.read_text()))
    assert len(named) >= 4
    assert named - set(METRICS) == set()


def test_every_behaviour_is_named() -> None:
    said = PAGE.read_text().partition("## Behaviours")[2].partition("##")[0]
    assert [name for name in BEHAVIOURS if name.split("_")[0] not in said and name != "language_switches"] == []


def test_the_table_shows_what_was_measured_and_a_dash_where_nothing_was() -> None:
    rows = {row["claim"]: row["ours"] for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    table = re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE.read_text().partition("## Measured")[2], re.MULTILINE)
    assert len(table) == 4
    for claim, shown in table:
        assert (shown == "–") == (claim not in rows), claim
        assert claim not in rows or abs(float(shown.replace(",", "")) - rows[claim]) <= 0.01 * abs(rows[claim]), claim
