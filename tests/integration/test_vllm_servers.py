"""Two real vLLM servers over HTTP against plain forwards and vLLM in this process."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.launch import process_table
from grpo_engine.rollout.vllm.held_outputs import HOLD_TOKENS
from grpo_engine.rollout.vllm.pool import VLLMServerSampler
from grpo_engine.types import Completion
from tests.sampling import requests, settings
from tests.vllm_models import CONTEXT, TOKENIZER, of_vllm, plain_logits, vllm_model, worst_gap, write_folder
from tests.waiting import wait_until

pytestmark = of_vllm
PROMPTS = ["7+5=", "347+285=", "1", "12*(3+4)=", "the quick brown fox jumps over the lazy dog; " * 2]
NO_END = {71}


def start(folder: Path, log_folder: Path, **config: Any) -> VLLMServerSampler:
    rollout = VLLMServerRollout.model_validate({"health_interval_s": 0.5, "start_timeout_s": 1800} | config)
    return VLLMServerSampler(rollout, folder, TOKENIZER, NO_END, CONTEXT, log_folder=log_folder)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerSampler]:
    folder = write_folder(vllm_model("llama"), tmp_path_factory.mktemp("model"))
    made = start(folder, tmp_path_factory.mktemp("logs"), num_servers=2)
    yield made
    made.close()
    assert servers_of_ours() == []


@pytest.fixture
def model() -> PreTrainedModel:
    return vllm_model("llama")


@pytest.fixture
def sampler(started: VLLMServerSampler, model: PreTrainedModel) -> VLLMServerSampler:
    """Two servers that hold the model's weights as of version 1."""
    started.load_weights(model.named_parameters(), 1)
    return started


def servers_of_ours() -> list[int]:
    """API servers that this process started."""
    return [pid for pid, (parent, state) in process_table().items() if parent == os.getpid() and is_server(pid)]


def is_server(pid: int) -> bool:
    try:
        return b"vllm.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children = [child for child, (parent, state) in process_table().items() if parent == pid and state != "Z"]
    return children + [below for child in children for below in descendants(child)]


# ---------------------------------------------------------------- speculation, untied heads
# First: the two servers of the other tests, which take their memory, have not been started yet.
def test_speculation_samples_the_policy_and_its_log_probabilities(tmp_path: Path) -> None:
    model = vllm_model("llama", tied=False)
    speculation = {"method": "ngram", "num_tokens": 3, "max_match": 3, "min_match": 1}
    sampler = start(write_folder(model, tmp_path / "model"), tmp_path, speculation=speculation)
    sampler.load_weights(model.named_parameters(), 1)
    asked = requests(PROMPTS, 4)
    for truncation in ({}, {"top_k": 4}):
        found = sampler.sample(asked, settings(temperature=0.7, max_new_tokens=60, **truncation))
        assert worst_gap(model, asked, found, 0.7) <= 1e-4
    sampler.close()


# ---------------------------------------------------------------- sampling
@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_p": 0.8, "min_p": 0.02}])
def test_log_probabilities_equal_a_plain_forward(
    sampler: VLLMServerSampler, model: PreTrainedModel, truncation: dict[str, float]
) -> None:
    asked = requests(PROMPTS, 4)
    found = sampler.sample(asked, settings(temperature=0.7, **truncation))
    assert worst_gap(model, asked, found, 0.7) <= 1e-4
    assert all((completion.kept_ids is None) == (not truncation) for completion in found)


def test_greedy_choice_is_the_likeliest_token_on_every_server(
    sampler: VLLMServerSampler, model: PreTrainedModel
) -> None:
    asked = requests(PROMPTS)
    for replica in sampler.replicas():
        for request, completion in zip(asked, replica.sample(asked, settings(temperature=0)), strict=True):
            assert completion.token_ids == plain_logits(model, request.prompt_ids, completion).argmax(-1).tolist()


def test_a_request_has_the_same_tokens_on_every_server(sampler: VLLMServerSampler) -> None:
    asked = requests(PROMPTS, 3)
    one, other = (replica.sample(asked, settings(temperature=1.0)) for replica in sampler.replicas())
    assert [c.token_ids for c in one] == [c.token_ids for c in other]
    assert len({tuple(c.token_ids) for c in one[:3]}) == 3


def test_a_stop_text_ends_a_completion_that_keeps_it(sampler: VLLMServerSampler) -> None:
    [free] = sampler.sample(requests(["7+5="]), settings(temperature=1.0))
    stop = [free.text[4:6]]
    [cut] = sampler.sample(requests(["7+5="]), settings(temperature=1.0, stop=stop))
    assert cut.text == free.text[: free.text.find(stop[0]) + 2]
    assert cut.finish_reason == "stop"


def test_tokens_that_nobody_waits_for_are_told_together(sampler: VLLMServerSampler) -> None:
    before = messages(sampler)
    [found] = sampler.replicas()[0].sample(requests(PROMPTS[:1]), settings(temperature=1.0, max_new_tokens=150))
    assert len(found.token_ids) > 30
    assert 1 <= messages(sampler) - before <= 2 + len(found.token_ids) / HOLD_TOKENS


def test_another_client_reads_the_texts_of_tokens(sampler: VLLMServerSampler) -> None:
    """They are decoded for whoever asks; we ask for ids."""
    body = {"prompt": TOKENIZER.encode("7+5="), "max_tokens": 4, "logprobs": 1, "temperature": 0, "ignore_eos": True}
    with first_server(sampler) as client:
        served = client.get("/v1/models").json()["data"][0]["id"]
        [choice] = client.post("/v1/completions", json=body | {"model": served}).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["tokens"]) == 4


def messages(sampler: VLLMServerSampler) -> float:
    """From the first server's engine to its API server, of completions, since the start."""
    with first_server(sampler) as client:
        text = client.get("/metrics").text
    return sum(
        float(value) for value in re.findall(r"^vllm:iteration_tokens_total_count\S* (\S+)$", text, re.MULTILINE)
    )


def first_server(sampler: VLLMServerSampler) -> httpx.Client:
    assert sampler._group is not None
    socket_path = sampler._group.processes[0].address.removeprefix("unix:")
    transport = httpx.HTTPTransport(uds=socket_path)
    return httpx.Client(transport=transport, base_url="http://server", trust_env=False)


# ---------------------------------------------------------------- weights
def test_an_update_replaces_every_weight_and_what_was_cached_on_every_server(sampler: VLLMServerSampler) -> None:
    """The head is tied: `lm_head.weight` is not among what is sent."""
    asked = requests(["the quick brown fox " * 8])
    for version, seed in enumerate((8, 9), start=2):
        new = vllm_model("llama", seed=seed)
        sampler.load_weights(new.named_parameters(), version)
        for replica in sampler.replicas():
            found = replica.sample(asked, settings(temperature=0, max_new_tokens=12))
            assert worst_gap(new, asked, found, 1.0) <= 1e-4
            assert found[0].policy_version == version


def in_another_thread(sampler: VLLMServerSampler, **sampling: Any) -> tuple[threading.Thread, list[Completion]]:
    """Long completions being sampled; returns once a server has begun with them."""
    found: list[Completion] = []
    sampler.take_metrics()
    thread = threading.Thread(target=lambda: found.extend(sampler.sample(requests(PROMPTS, 2), settings(**sampling))))
    thread.start()
    wait_until(lambda: "rollout/cached_prompt_share" in sampler.take_metrics(), 60, "a prompt is computed")
    return thread, found


def test_an_update_in_flight_changes_what_follows(sampler: VLLMServerSampler) -> None:
    new = vllm_model("llama", seed=8)
    thread, found = in_another_thread(sampler, temperature=0, max_new_tokens=150)
    sampler.load_weights(new.named_parameters(), 2)
    thread.join()
    last = plain_logits(new, requests(PROMPTS)[0].prompt_ids, found[0])[-15:].argmax(-1).tolist()
    assert found[0].token_ids[-15:] == last
    assert {completion.policy_version for completion in found} == {1}
    assert "aborted" not in {completion.finish_reason for completion in found}


def test_abort_ends_what_is_being_sampled_with_what_it_has(sampler: VLLMServerSampler) -> None:
    thread, found = in_another_thread(sampler, temperature=0.7, top_k=4, max_new_tokens=150)
    sampler.abort()
    thread.join()
    assert "aborted" in {completion.finish_reason for completion in found}
    assert len(sampler.sample(requests(PROMPTS), settings())) == len(PROMPTS)


# ---------------------------------------------------------------- failures
def test_a_server_that_is_killed_leaves_nothing_and_comes_back_with_the_present_weights(
    sampler: VLLMServerSampler, model: PreTrainedModel
) -> None:
    killed = servers_of_ours()[0]
    below = descendants(killed)
    assert below
    os.kill(killed, signal.SIGKILL)
    asked = requests(PROMPTS, 2)
    found = sampler.sample(asked, settings(temperature=0.7))
    assert worst_gap(model, asked, found, 0.7) <= 1e-4
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20, "its engine process has gone")
    wait_until(lambda: len(sampler.sample(asked[:1], settings())) and len(sampler.replicas()) == 2, 1200, "it is back")
    for replica in sampler.replicas():
        assert worst_gap(model, asked, replica.sample(asked, settings(temperature=0.7)), 0.7) <= 1e-4
