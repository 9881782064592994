"""What vLLM is told, and how its answers are read; needs no vLLM."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import VLLMRollout, VLLMServerRollout
from grpo_engine.errors import NonFinite, RolloutUnavailable
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.model.truncation import kept_mask
from grpo_engine.rollout.vllm import options
from grpo_engine.rollout.vllm.metrics import (
    ACCEPTED,
    ACCEPTED_BY_DEPTH,
    DRAFTED,
    DRAFTS,
    SpeculationCounts,
    speculation_counts,
)
from grpo_engine.rollout.vllm.outputs import Completions, read_truncated, read_untruncated
from grpo_engine.rollout.vllm.turns import Turns
from grpo_engine.rollout.vllm.widening import top_logprobs, widened

TOKENIZER = character_tokenizer(64)
EOS = 2


def engine_options(config: dict[str, Any], folder: Path, **told: Any) -> dict[str, Any]:
    defaults = {"dtype": "float32", "max_context_tokens": 64, "on_cpu": True, "seed": 3}
    return options.engine_options(VLLMRollout.model_validate(config), folder, **(defaults | told))


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


# ---------------------------------------------------------------- engine
@pytest.mark.parametrize(
    ("speculation", "told"),
    [
        (
            {"method": "ngram", "num_tokens": 2},
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        ({"method": "mtp", "num_tokens": 1}, {"method": "mtp", "num_speculative_tokens": 1}),
        (
            {"method": "eagle3", "model": "/heads"},
            {"method": "eagle3", "num_speculative_tokens": 3, "model": "/heads"},
        ),
    ],
)
def test_speculation_passes_through(speculation: dict[str, Any], told: dict[str, Any], tmp_path: Path) -> None:
    assert engine_options({"speculation": speculation}, tmp_path)["speculative_config"] == told


def test_without_speculation_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert "speculative_config" not in engine_options({}, tmp_path)


def test_a_folder_without_weights_starts_with_random_ones(tmp_path: Path) -> None:
    assert engine_options({}, tmp_path)["load_format"] == "dummy"
    (tmp_path / "model.safetensors").touch()
    assert engine_options({}, tmp_path)["load_format"] == "auto"


def test_the_context_is_never_longer_than_the_models(tmp_path: Path) -> None:
    assert engine_options({}, tmp_path)["max_model_len"] == 64
    assert engine_options({"max_model_len": 40}, tmp_path)["max_model_len"] == 40
    assert engine_options({"max_model_len": 400}, tmp_path)["max_model_len"] == 64


def test_memory_and_sleep_are_a_matter_of_gpus(tmp_path: Path) -> None:
    config = {"memory_share": 0.2, "sleep": True}
    on_gpu = engine_options(config, tmp_path, on_cpu=False)
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enable_sleep_mode"]) == (0.2, True)
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & set(engine_options(config, tmp_path))


def test_graphs_are_compiled_on_gpus_unless_told_otherwise(tmp_path: Path) -> None:
    assert engine_options({}, tmp_path)["enforce_eager"] is True
    assert engine_options({}, tmp_path, on_cpu=False)["enforce_eager"] is False
    assert engine_options({"enforce_eager": False}, tmp_path)["enforce_eager"] is False


def test_engine_options_become_flags_of_a_server() -> None:
    told = {"max_model_len": 64, "enforce_eager": True, "trust_remote_code": False, "weight": {"backend": "x"}}
    assert options.server_arguments(told) == [
        "--max-model-len=64", "--enforce-eager", "--no-trust-remote-code", '--weight={"backend": "x"}',
    ]  # fmt: skip


def test_the_trainers_threads_are_left_where_they_are() -> None:
    variables = options.environment(VLLMServerRollout(cpu_cache_gib=2), on_cpu=True, in_process=True)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_where_vllm_is_absent_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RolloutUnavailable, match="make install-vllm"):
        options.require_vllm()


# ---------------------------------------------------------------- requests
def request_options(room_tokens: int = 100, stream: tuple[int, ...] = (1, 2), **sampling: Any) -> dict[str, Any]:
    config = SamplingConfig.model_validate({"max_new_tokens": 20, **sampling})
    return options.sampling_options(config, {5, 2}, room_tokens=room_tokens, stream=stream)


def test_a_completion_ends_where_the_context_does() -> None:
    assert request_options()["max_tokens"] == 20
    assert request_options(room_tokens=7)["max_tokens"] == 7


def test_every_end_token_ends_a_completion() -> None:
    assert request_options()["stop_token_ids"] == [2, 5]


def test_kept_tokens_are_asked_for_under_truncation_only() -> None:
    assert request_options()["logprobs"] == 0
    assert request_options(top_k=4)["logprobs"] == options.ALL_KEPT
    assert request_options(top_p=0.9)["logprobs"] == options.ALL_KEPT


def test_greedy_choice_is_not_truncated() -> None:
    greedy = request_options(temperature=0, top_k=4)
    assert greedy["logprobs"] == 0
    assert "top_k" not in greedy


def test_each_stream_has_a_seed_of_its_own() -> None:
    seeds = {options.request_seed((0, stage, position)) for stage in range(10) for position in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_options(stream=(4, 5))["seed"] == options.request_seed((4, 5))


def test_seeds_of_a_group_follow_each_other() -> None:
    """As vLLM seeds the completions of one request."""
    first = options.request_seed((0, 1, 4411, 0))
    assert [options.request_seed((0, 1, 4411, index)) - first for index in range(4)] == [0, 1, 2, 3]
    assert abs(options.request_seed((0, 1, 4412, 0)) - first) > 1000


def test_a_stop_text_stays_in_the_completion() -> None:
    told = request_options(stop=["</think>"])
    assert told["stop"] == ["</think>"]
    assert told["include_stop_str_in_output"]
    assert "stop" not in request_options()


# ---------------------------------------------------------------- widened log-probabilities
def truncated_rows(top_k: int, top_p: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [4, 30], temperatures, and the truncated log-probabilities as vLLM computes them."""
    torch.manual_seed(0)
    logits, temperature = torch.randn(4, 30) * 3, torch.tensor([0.7, 1.0, 1.3, 0.0])
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    kept = kept_mask(scaled, top_k, top_p, 0.0)
    return logits, temperature, scaled.masked_fill(~kept, float("-inf")).log_softmax(-1)


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.8), (1, 1.0), (30, 1.0)])
def test_a_widened_row_tells_kept_tokens_and_both_log_probabilities(top_k: int, top_p: float) -> None:
    logits, temperature, logprobs = truncated_rows(top_k, top_p)
    sampled = logprobs.argmax(-1)
    rows = widened(logprobs, top_logprobs(logits, temperature), sampled)
    entries = list(zip(rows[0].tolist(), rows[1].tolist(), strict=True))
    read = read_truncated(sampled.tolist(), entries, "length")
    full = (logits / torch.where(temperature > 0, temperature, 1.0)[:, None]).log_softmax(-1)
    torch.testing.assert_close(torch.tensor(read.logprobs), logprobs.gather(1, sampled[:, None])[:, 0])
    torch.testing.assert_close(torch.tensor(read.full_logprobs), full.gather(1, sampled[:, None])[:, 0])
    assert read.kept_ids == [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs]


def test_a_widened_row_survives_a_dictionary() -> None:
    """Servers answer with one value an id, in any order."""
    logits, temperature, logprobs = truncated_rows(4)
    logprobs[0] = logits[0].log_softmax(-1)  # this row keeps every token
    sampled = torch.tensor([3, *logprobs[1:].argmax(-1).tolist()])
    rows = widened(logprobs, top_logprobs(logits, temperature), sampled)
    entries = [dict(zip(*row, strict=True)) for row in zip(rows[0].tolist(), rows[1].tolist(), strict=True)]
    read = read_truncated(sampled.tolist(), [(list(row), list(row.values())) for row in entries], "length")
    assert read.kept_ids == [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs]
    assert read.logprobs == logprobs.gather(1, sampled[:, None])[:, 0].tolist()


def test_a_row_that_keeps_everything_has_one_log_probability() -> None:
    logits = torch.randn(1, 5)
    rows = widened(logits.log_softmax(-1), top_logprobs(logits, torch.ones(1)), torch.tensor([2]))
    read = read_truncated([2], [(rows[0][0].tolist(), rows[1][0].tolist())], "length")
    assert read.logprobs == read.full_logprobs


def test_a_row_without_numbers_is_refused() -> None:
    rows = widened(torch.full((1, 5), torch.nan), torch.full((1,), torch.nan), torch.tensor([2]))
    with pytest.raises(NonFinite, match="token 2"):
        read_truncated([2], [(rows[0][0].tolist(), rows[1][0].tolist())], "length")


def test_log_probabilities_that_are_none_are_refused() -> None:
    with pytest.raises(NonFinite, match="learning rate"):
        Completions(TOKENIZER, {EOS}).make(read_untruncated([7], [float("nan")], "length"), [], 0)


# ---------------------------------------------------------------- completions
def completion(tokens: list[int], finish: str, stop: list[str] | None = None) -> Any:
    return Completions(TOKENIZER, {EOS}).make(read_untruncated(tokens, [-1.0] * len(tokens), finish), stop or [], 4)


def test_the_end_token_belongs_to_the_tokens_and_not_to_the_text() -> None:
    made = completion([*ids("12"), EOS], "stop")
    assert (made.text, made.finish_reason, made.token_texts) == ("12", "stop", ["1", "2", "<eos>"])
    assert made.policy_version == 4


@pytest.mark.parametrize(("finish", "reason"), [("length", "length"), ("abort", "aborted"), ("stop", "stop")])
def test_how_a_completion_ended_is_kept(finish: str, reason: str) -> None:
    assert completion(ids("12"), finish).finish_reason == reason


def test_tokens_that_speculation_added_behind_the_end_are_cut() -> None:
    made = completion([*ids("1"), EOS, *ids("99")], "length")
    assert (made.token_ids, made.finish_reason, len(made.logprobs)) == ([*ids("1"), EOS], "stop", 2)


def test_tokens_behind_a_stop_text_are_cut() -> None:
    made = completion(ids("1+ab=cd"), "stop", ["b=", "zz"])
    assert (made.text, made.finish_reason, len(made.logprobs)) == ("1+ab=", "stop", 5)


def test_an_aborted_completion_may_be_empty() -> None:
    assert completion([], "abort").finish_reason == "aborted"


# ---------------------------------------------------------------- speculation
@dataclass
class Counter:
    name: str
    value: int = 0
    values: tuple[int, ...] = ()


def test_counters_of_speculation_become_metrics_of_what_came_since() -> None:
    def told(drafts: int, drafted: int, accepted: int, by_depth: tuple[int, ...]) -> SpeculationCounts:
        counters = [Counter(DRAFTS, drafts), Counter(DRAFTED, drafted), Counter(ACCEPTED, accepted)]
        return speculation_counts([*counters, Counter(ACCEPTED_BY_DEPTH, values=by_depth), Counter("vllm:other")])

    before, now = told(10, 30, 12, (8, 3, 1)), told(30, 90, 42, (24, 13, 5))
    assert now.since(before) == {
        "rollout/drafted_tokens": 60.0,
        "rollout/accepted_share": 0.5,
        "rollout/draft_length_mean": 3.0,
        "rollout/tokens_per_forward": 2.5,
        "rollout/accepted_share_1": 0.8,
        "rollout/accepted_share_2": 0.5,
        "rollout/accepted_share_3": 0.2,
    }
    assert before.since(SpeculationCounts())["rollout/accepted_share_1"] == 0.8
    assert now.since(now) == {}


# ---------------------------------------------------------------- turns
def test_a_busy_thread_cannot_keep_the_engine_from_another() -> None:
    turns, seen = Turns(), threading.Event()

    def other() -> None:
        with turns.turn():
            seen.set()

    waiting = threading.Thread(target=other)
    with turns.turn():
        waiting.start()
        while not turns._next.locked():
            pass
    with turns.turn():
        assert seen.is_set()
    waiting.join()
