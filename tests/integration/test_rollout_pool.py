"""The vLLM server backend against a stand-in that speaks vLLM's endpoints over HTTP."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import DataError, NonFinite, RolloutUnavailable
from grpo_engine.protocols import Replicated
from grpo_engine.rollout.vllm.pool import VLLMServerSampler
from grpo_engine.types import SampleRequest
from tests.stand_in_pool import REQUESTS, SAMPLING, WEIGHTS, make
from tests.vllm_stand_in import LOGPROB, StandIn
from tests.waiting import wait_until

TRUNCATED = SamplingConfig(max_new_tokens=4, temperature=0.7, top_k=2)


METRICS = """# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 128.0
vllm:prefix_cache_hits_total{engine="0"} 96.0
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 8.0
"""


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    made = [StandIn(), StandIn()]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def sampler(tmp_path: Path, servers: list[StandIn]) -> Iterator[VLLMServerSampler]:
    made = make(tmp_path, servers)
    made.load_weights(WEIGHTS.items(), 3)
    yield made
    made.close()


# ---------------------------------------------------------------- sampling
def test_token_ids_go_in_and_come_out(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    completions = sampler.sample(REQUESTS, SAMPLING)
    bodies = [body for server in servers for body in server.bodies]
    assert all(body["prompt"] == [5, 6, 7] and body["return_token_ids"] for body in bodies)
    assert len({body["seed"] for body in bodies}) == len(REQUESTS)
    assert {len(completion.token_ids) for completion in completions} == {4}
    assert completions[0].logprobs == completions[0].full_logprobs == [LOGPROB] * 4
    assert {(completion.finish_reason, completion.policy_version) for completion in completions} == {("length", 3)}


def test_a_request_has_the_same_tokens_whichever_server_it_meets(tmp_path: Path, servers: list[StandIn]) -> None:
    found = []
    for chosen in ([servers[0]], servers):
        sampler = make(tmp_path, chosen)
        sampler.load_weights(WEIGHTS.items(), 0)
        found.append([completion.token_ids for completion in sampler.sample(REQUESTS, SAMPLING)])
        sampler.close()
    assert found[0] == found[1]


def test_truncated_completions_carry_what_was_kept_and_the_full_logprob(sampler: VLLMServerSampler) -> None:
    completion = sampler.sample(REQUESTS[:1], TRUNCATED)[0]
    token = completion.token_ids[0]
    assert completion.kept_ids == [[token, token + 1]] * 4
    assert completion.full_logprobs == pytest.approx([LOGPROB + math.log(0.8)] * 4)


def test_the_context_of_the_smallest_server_limits_completions(sampler: VLLMServerSampler) -> None:
    prompt = SampleRequest([5] * 62, (0, 0), "0")
    assert len(sampler.sample([prompt], SAMPLING)[0].token_ids) == 2


@pytest.mark.parametrize(("prompt", "told"), [([], "no tokens"), ([5] * 64, "64 tokens")])
def test_a_prompt_that_leaves_no_room_is_never_sent(
    sampler: VLLMServerSampler, servers: list[StandIn], prompt: list[int], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        sampler.sample([SampleRequest(prompt, (0, 0), "0")], SAMPLING)
    assert servers[0].bodies == servers[1].bodies == []


def test_numbers_that_are_not_finite_are_no_fault_of_the_server(
    sampler: VLLMServerSampler, servers: list[StandIn]
) -> None:
    servers[0].refuses["/v1/completions"] = (500, {"error": "Out of range float values are not JSON compliant: nan"})
    servers[1].logprob = math.nan
    for replica in sampler.replicas():
        with pytest.raises(NonFinite):
            replica.sample(REQUESTS[:1], SAMPLING)


def test_what_one_server_refuses_is_not_tried_on_another(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    for server in servers:
        server.refuses["/v1/completions"] = (400, {"message": "top_k must be 0 or more"})
    with pytest.raises(RolloutUnavailable, match=r"/v1/completions was answered with status 400: .*top_k must be"):
        sampler.sample(REQUESTS[:1], SAMPLING)
    assert len(servers[0].calls + servers[1].calls) == 2 * len(UPDATE) + 1


def test_replicas_reach_every_server(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    assert isinstance(sampler, Replicated)
    for replica in sampler.replicas():
        replica.sample(REQUESTS[:2], SAMPLING)
    assert [len(server.bodies) for server in servers] == [2, 2]


# ---------------------------------------------------------------- weights
UPDATE = [
    "/pause?mode=keep", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/reset_prefix_cache", "/resume",
]  # fmt: skip


def test_an_update_pauses_loads_forgets_the_cache_and_goes_on(
    sampler: VLLMServerSampler, servers: list[StandIn]
) -> None:
    for server in servers:
        assert server.calls == UPDATE
        assert server.weights == {"head.weight": WEIGHTS["head.weight"].numpy().tobytes()}
    sampler.load_weights(WEIGHTS.items(), 4)
    assert servers[0].calls[len(UPDATE) :] == [path for path in UPDATE if "init" not in path]


def test_weights_go_through_a_folder_where_one_is_given(tmp_path: Path, servers: list[StandIn]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    sampler = make(tmp_path, servers, weights_folder=str(shared))
    sampler.load_weights(WEIGHTS.items(), 1)
    sampler.load_weights(WEIGHTS.items(), 2)
    assert len(list(shared.iterdir())) == 1
    sampler.close()
    assert list(shared.iterdir()) == []
    assert servers[1].weights.keys() == WEIGHTS.keys()


def test_nothing_is_sampled_before_the_first_weights(tmp_path: Path, servers: list[StandIn]) -> None:
    sampler = make(tmp_path, servers)
    with pytest.raises(RuntimeError, match="load_weights comes before sample"):
        sampler.sample(REQUESTS, SAMPLING)
    sampler.close()
    sampler.close()


def test_completions_salt_the_cache_with_the_weights_they_are_of(
    sampler: VLLMServerSampler, servers: list[StandIn]
) -> None:
    salts = []
    for version in (3, 4):
        sampler.load_weights(WEIGHTS.items(), version)
        sampler.sample(REQUESTS, SAMPLING)
        salts.append(servers[0].bodies[-1]["cache_salt"])
    assert salts[0] != salts[1]
    assert servers[0].version == salts[1]


def test_what_servers_count_is_summed_and_told_once(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    for server in servers:
        server.metrics = METRICS
    metrics = sampler.take_metrics()
    assert metrics["rollout/cached_prompt_share"] == 0.75
    assert metrics["rollout/accepted_share"] == 0.4
    assert "rollout/cached_prompt_share" not in sampler.take_metrics()


# ---------------------------------------------------------------- failures
def test_a_run_goes_on_without_a_server_that_died_and_with_it_when_it_is_back(
    sampler: VLLMServerSampler, servers: list[StandIn]
) -> None:
    servers[0].die()
    assert len(sampler.sample(REQUESTS, SAMPLING)) == 6
    assert len(servers[1].bodies) == 6
    metrics = sampler.take_metrics()
    assert (metrics["rollout/servers_ready"], metrics["rollout/requests_retried"]) == (1, 3)
    servers[0].start_again()
    wait_until(lambda: len(sampler.replicas()) == 2, 10, "the server is back")
    assert servers[0].weights.keys() == WEIGHTS.keys()


def test_with_no_server_left_the_run_ends_with_their_names(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    for server in servers:
        server.die()
    with pytest.raises(RolloutUnavailable) as failure:
        sampler.sample(REQUESTS, SAMPLING)
    assert all(server.address in str(failure.value) for server in servers)


def test_weights_that_no_server_takes_end_the_run_at_once(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    for server in servers:
        server.refuses["/update_weights"] = (500, {"error": "no such parameter: head.weight"})
    with pytest.raises(RolloutUnavailable, match=r"no vLLM server took the weights: .*no such parameter"):
        sampler.load_weights(WEIGHTS.items(), 4)
    calls = servers[0].calls[len(UPDATE) :]
    assert calls[calls.index("/update_weights") + 1] == "/resume"


def test_a_server_without_weight_updates_is_told_how_to_start(tmp_path: Path, servers: list[StandIn]) -> None:
    servers[0].refuses["/weight_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(RolloutUnavailable, match=r"takes no weight updates .*VLLM_SERVER_DEV_MODE=1"):
        make(tmp_path, servers)


def test_a_server_on_another_host_needs_a_folder_for_weights(tmp_path: Path) -> None:
    with pytest.raises(RolloutUnavailable, match=r"http://10\.0\.0\.5:8000 is on another host; set rollout\.weights_"):
        make(tmp_path, [], addresses=["http://10.0.0.5:8000"])


def test_sampling_is_aborted_from_another_thread(sampler: VLLMServerSampler, servers: list[StandIn]) -> None:
    for server in servers:
        server.open.clear()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(sampler.sample(REQUESTS, SAMPLING)))
    thread.start()
    wait_until(lambda: len(servers[0].bodies) == 3, 10, "the server is at work")
    sampler.abort()
    assert servers[0].calls[-1] == "/abort_requests"
    for server in servers:
        server.open.set()
    thread.join()
    assert len(found) == 6
