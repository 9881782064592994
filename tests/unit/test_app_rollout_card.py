"""The Rollout card: what the config asks of the sampler in words, and what the newest step measured."""

from typing import Any

import pytest

from app.models import Run
from app.runs.rollout_card import RolloutCard, backend_text, drafts_text, probe_tolerance, rollout_card
from grpo_engine.stages.probe import TOLERANCE_NATS
from tests import seed
from tests.seed_rollouts import mtp_values, rollout_values

SYNC: dict[str, Any] = {"policy_version": 41, "checksum": "1a2b3c4d5e6f7081"}


def card(values: dict[str, float], sync: dict[str, Any] | None = None, **changes: Any) -> RolloutCard:
    run = Run(config=seed.config(**changes).model_dump(mode="json"))
    found = rollout_card(run, "1-rl", values, sync)
    assert found is not None
    return found


def facts(found: RolloutCard) -> dict[str, str]:
    return {fact.label: fact.text for fact in found.plan + found.facts}


@pytest.mark.parametrize(
    ("rollout", "backend", "drafts"),
    [
        ({"backend": "torch"}, "own decoder", "none"),
        ({"backend": "torch", "drafts": {"kind": "ngram"}}, "own decoder", "n-gram, 2–5 or none"),
        (
            {"backend": "torch", "drafts": {"kind": "mtp", "min_tokens": 3, "max_tokens": 3, "allow_zero": False}},
            "own decoder",
            "MTP heads, 3",
        ),
        ({"backend": "torch", "drafts": {"kind": "mtp", "fixed_tokens": 4}}, "own decoder", "MTP heads, always 4"),
        ({"backend": "vllm"}, "vLLM in process", "none"),
        ({"backend": "vllm", "speculation": {"method": "ngram"}}, "vLLM in process", "n-gram, 3"),
        ({"backend": "vllm_server"}, "1 vLLM server, started by each rank", "none"),
        ({"backend": "vllm_server", "addresses": ["http://a", "http://b"]}, "2 vLLM servers, given by address", "none"),
    ],
)
def test_what_the_config_asks_for_is_said_in_words(rollout: dict[str, Any], backend: str, drafts: str) -> None:
    config = seed.config(rollout=rollout).model_dump(mode="json")
    assert (backend_text(config), drafts_text(config)) == (backend, drafts)


def test_a_deterministic_run_drafts_as_many_as_it_says() -> None:
    config = seed.config(deterministic=True, rollout={"backend": "torch", "drafts": {"kind": "ngram"}})
    assert drafts_text(config.model_dump(mode="json")) == "n-gram, always 2"


def test_drafts_show_lengths_acceptance_and_heads_in_the_order_of_their_numbers() -> None:
    config = seed.config()
    found = card(rollout_values(10, config) | mtp_values(10, config) | {"rollout/draft_length_share_10": 0.0})
    lengths, accepted, heads = found.histograms
    assert [column.label for column in lengths.columns] == ["0", "2", "3", "4", "5", "10"]
    assert [column.text for column in accepted.columns] == ["45 %", "32 %", "26 %", "22 %", "20 %"]
    assert accepted.columns[0].title == "45 % of drafts that long were accepted up to token 1"
    assert heads.spoken == "heads right: 1 61 %, 2 50 %"
    assert facts(found)["tokens a forward"] == "1.80 tokens"
    assert found.waiting_text == ""


def test_a_gain_below_one_and_a_probe_above_its_limit_are_said_and_coloured() -> None:
    values = {"rollout/draft_gain": 0.91, "rollout/probe_gap_nats": 0.004, "rollout/weight_updates_repeated": 1.0}
    found = card(values, SYNC, rollout={"backend": "vllm"})
    tones = [fact.tone for fact in found.facts]
    assert tones == ["warn", "warn", "warn", ""]
    told = [fact.text for fact in found.facts]
    assert told == ["0.910 ×, slower than plain", "0.004 nats, above 0.001", "1, the probe failed once", "version 41"]
    assert SYNC["checksum"] in found.facts[-1].title


def test_the_limit_of_the_probe_follows_the_config_and_the_compute_type() -> None:
    gap = {"rollout/probe_gap_nats": 0.004}
    assert card(gap, rollout={"backend": "vllm"}, dtype="bfloat16").facts[0].text == "0.004 nats, limit 0.250"
    own = {"backend": "vllm", "probe": {"tolerance_nats": 0.01}}
    assert card(gap, rollout=own).facts[0].text == "0.004 nats, limit 0.010"


def test_servers_that_failed_are_said_and_coloured() -> None:
    values = {"rollout/servers_ready": 2.0, "rollout/requests_retried": 3.0, "rollout/cached_prompt_share": 0.9}
    found = card(values, rollout={"backend": "vllm_server", "num_servers": 2})
    assert [(fact.text, fact.tone) for fact in found.facts] == [
        ("90 %", ""), ("2 servers", ""), ("3, their server failed", "warn"),
    ]  # fmt: skip
    assert card(values | {"rollout/requests_retried": 0.0}).facts[-1].text == "0 requests"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_card_names_the_limit_that_the_engine_holds_the_probe_to(dtype: str) -> None:
    assert probe_tolerance(seed.config(dtype=dtype, rollout={"backend": "vllm"}).model_dump()) == TOLERANCE_NATS[dtype]


def test_nothing_measured_says_what_will_appear() -> None:
    assert "first sampled batch" in card({}).waiting_text
    run = Run(config=seed.config().model_dump(mode="json"))
    supervised = rollout_card(run, "0-sft", {})
    assert supervised is not None
    assert "samples nothing" in supervised.waiting_text


def test_a_run_of_an_earlier_version_and_one_that_samples_nothing_are_no_trouble() -> None:
    old = seed.config().model_dump(mode="json")
    del old["rollout"], old["mtp"]
    found = rollout_card(Run(config=old), "1-rl", {})
    assert found is not None
    assert (found.backend, [fact.text for fact in found.plan]) == ("own decoder", ["none"])
    assert rollout_card(Run(config={**old, "stages": old["stages"][:1]}), "0-sft", {}) is None
