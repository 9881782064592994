"""The vLLM server backend over updates, ranks and failed starts, against a stand-in that speaks vLLM's endpoints."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.errors import DataError, RolloutUnavailable
from grpo_engine.rollout.vllm import pool
from grpo_engine.rollout.vllm.pool import LAUNCH, VLLMServerSampler
from grpo_engine.types import SampleRequest
from tests.stand_in_pool import REQUESTS, SAMPLING, WEIGHTS, make
from tests.unit.tiny_models import TOKENIZER
from tests.vllm_stand_in import StandIn

THREAD = "vllm-servers"


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    made = [StandIn(), StandIn()]
    yield made
    for server in made:
        server.stop()


def tells(server: StandIn, context: int | None) -> None:
    """The server's own context; None: it does not say."""
    told = {} if context is None else {"max_model_len": context}
    server.refuses["/v1/models"] = (200, {"data": [told]})


@pytest.mark.parametrize(("contexts", "room"), [((64, 10), 10), ((None, 10), 10), ((None, None), 64), ((99, 99), 64)])
def test_prompts_fit_the_shortest_context_of_the_servers_and_the_model(
    tmp_path: Path, servers: list[StandIn], contexts: tuple[int | None, int | None], room: int
) -> None:
    for server, context in zip(servers, contexts, strict=True):
        tells(server, context)
    sampler = make(tmp_path, servers)
    sampler.load_weights(WEIGHTS.items(), 1)
    assert len(sampler.sample([SampleRequest([5] * (room - 2), (0, 0), "0")], SAMPLING)[0].token_ids) == 2
    with pytest.raises(DataError, match=f"vLLM's context of {room} leaves no room"):
        sampler.sample([SampleRequest([5] * room, (0, 0), "0")], SAMPLING)
    sampler.close()


def test_an_update_that_is_repeated_is_another_update(tmp_path: Path, servers: list[StandIn]) -> None:
    sampler = make(tmp_path, servers)
    versions = []
    for _ in range(2):
        sampler.load_weights(WEIGHTS.items(), 0)
        versions.append(servers[0].version)
        assert sampler.sample(REQUESTS[:1], SAMPLING)[0].policy_version == sampler.policy_version == 0
    sampler.close()
    assert versions[0] != versions[1]
    assert all(str(version).startswith(LAUNCH) for version in versions)


def test_the_file_of_the_update_before_goes_even_when_the_next_fails(tmp_path: Path, servers: list[StandIn]) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    sampler = make(tmp_path, servers, weights_folder=str(shared))
    sampler.load_weights(WEIGHTS.items(), 1)
    before = set(shared.iterdir())
    for server in servers:
        server.refuses["/update_weights"] = (500, {"error": "no room"})
    with pytest.raises(RolloutUnavailable, match="no room"):
        sampler.load_weights(WEIGHTS.items(), 2)
    assert len(set(shared.iterdir())) == 1
    assert set(shared.iterdir()).isdisjoint(before)
    assert sampler.policy_version == 1
    sampler.close()


def test_a_rank_that_updates_no_server_reads_the_weights_with_the_others_and_sends_none(
    tmp_path: Path, servers: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "UPDATES", itertools.count(1))
    servers[0].version = f"{LAUNCH}-1-3"  # the other rank was first
    config = VLLMServerRollout(addresses=[servers[0].address], health_interval_s=0.05)
    sampler = VLLMServerSampler(config, tmp_path, TOKENIZER, {2}, 64, log_folder=tmp_path, rank=1, num_ranks=2)
    weights = iter(WEIGHTS.items())
    sampler.load_weights(weights, 3)
    assert list(weights) == []
    assert servers[0].calls == []
    assert sampler.sample(REQUESTS[:1], SAMPLING)[0].policy_version == 3
    sampler.close()


def test_each_replica_is_one_server(tmp_path: Path, servers: list[StandIn]) -> None:
    sampler = make(tmp_path, servers)
    sampler.load_weights(WEIGHTS.items(), 1)
    first, second = sampler.replicas()
    first.sample(REQUESTS[:4], SAMPLING)
    assert [len(server.bodies) for server in servers] == [4, 0]
    second.sample(REQUESTS[:2], SAMPLING)
    assert [len(server.bodies) for server in servers] == [4, 2]
    sampler.close()


def test_completions_that_went_to_another_server_are_told_once(tmp_path: Path, servers: list[StandIn]) -> None:
    sampler = make(tmp_path, servers)
    sampler.load_weights(WEIGHTS.items(), 1)
    servers[0].die()
    sampler.sample(REQUESTS, SAMPLING)
    assert [sampler.take_metrics()["rollout/requests_retried"] for _ in range(2)] == [3, 0]
    sampler.close()


def test_a_group_is_computed_by_one_server_and_groups_are_spread(tmp_path: Path, servers: list[StandIn]) -> None:
    sampler = make(tmp_path, servers)
    sampler.load_weights(WEIGHTS.items(), 1)
    sampler.sample(
        [SampleRequest([5, group], (group, copy), str(group)) for group in (8, 9) for copy in (0, 1)], SAMPLING
    )
    assert [{body["prompt"][1] for body in server.bodies} for server in servers] in ([{8}, {9}], [{9}, {8}])
    assert len({body["seed"] for server in servers for body in server.bodies}) == 4
    sampler.close()


def threads() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_a_start_that_fails_leaves_no_thread(tmp_path: Path, servers: list[StandIn]) -> None:
    servers[1].refuses["/weight_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(RolloutUnavailable):
        make(tmp_path, servers)
    assert threads() == []
