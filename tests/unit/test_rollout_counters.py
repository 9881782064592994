"""What vLLM servers count, read from Prometheus' text and told as metrics."""

from __future__ import annotations

import pytest

from grpo_engine.rollout.vllm.counters import as_metrics, counted, read_counters

TEXT = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.0e+02
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 60.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
"""


def test_counters_become_metrics_over_all_engines() -> None:
    assert as_metrics(read_counters(TEXT)) == {
        "rollout/drafted_tokens": 20,
        "rollout/accepted_share": 0.4,
        "rollout/draft_length_mean": 2.0,
        "rollout/tokens_per_forward": pytest.approx(1.8),
        "rollout/accepted_share_1": 0.6,
        "rollout/accepted_share_2": 0.2,
        "rollout/cached_prompt_share": 0.25,
    }


def test_only_what_came_since_the_last_look_counts() -> None:
    before = read_counters(TEXT)
    now = {name: count + 5 for name, count in before.items()}
    assert set(counted(now, before).values()) == {5}
    assert as_metrics(counted(before, before)) == {}


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    now = {"vllm:prefix_cache_queries": 30, "vllm:prefix_cache_hits": 15}
    assert as_metrics(counted(now, read_counters(TEXT))) == {"rollout/cached_prompt_share": 0.5}
