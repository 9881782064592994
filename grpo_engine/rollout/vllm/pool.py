"""Sampling with vLLM servers over HTTP: our own, started for this rank, or given by address.

    sampler = VLLMServerSampler(config, folder, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens, …)
    sampler.load_weights(learner.iter_full_weights(), version)     # also before the first sample
    completions = sampler.sample(requests, sampling)

Each completion has the seed of its stream, however it is asked for, so it can be tried again on another server and has
the same tokens there, up to float noise. `dispatch` spreads the work, `members` keeps health and weights, both on an
event loop in a thread of its own: weights may be loaded while another thread samples.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.errors import DataError, RolloutUnavailable
from grpo_engine.launch import LAUNCH_ID
from grpo_engine.rollout.vllm import options
from grpo_engine.rollout.vllm.background import BackgroundLoop
from grpo_engine.rollout.vllm.client import RequestRefused
from grpo_engine.rollout.vllm.counters import as_metrics
from grpo_engine.rollout.vllm.dispatch import Dispatcher, Job
from grpo_engine.rollout.vllm.joining import given_members, own_members, start_group
from grpo_engine.rollout.vllm.members import Member, Members, Weights
from grpo_engine.rollout.vllm.outputs import Completions
from grpo_engine.rollout.vllm.servers import ServerGroup
from grpo_engine.rollout.vllm.weights_file import WeightsFile
from grpo_engine.types import Completion, SampleRequest

LAUNCH = os.environ.get(LAUNCH_ID) or uuid.uuid4().hex
"""The same for all ranks of an engine, unlike that of any other."""
UPDATES = itertools.count(1)
"""Numbers this process's updates. Ranks call `load_weights` together, so they count alike."""

T = TypeVar("T")


class VLLMServerSampler:
    """Implements `protocols.Sampler` and `protocols.Replicated`. Make it in the main thread: our own servers die with
    the thread that started them, and are started again after a crash only from there."""

    shares_weights = False

    def __init__(
        self,
        config: VLLMServerRollout,
        folder: Path,
        tokenizer: PreTrainedTokenizerFast,
        end_token_ids: Collection[int],
        max_context_tokens: int,
        *,
        log_folder: Path,
        dtype: str = "float32",
        device: torch.device | None = None,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Start servers on the model in `folder`, or reach this rank's share of `config.addresses`; wait for them.

        Raises RolloutUnavailable where vLLM is not installed, a server of ours does not start, or none answers."""
        self.policy_version = 0
        self._config = config
        self._dtype = dtype
        self._end_token_ids = frozenset(end_token_ids)
        self._completions = Completions(tokenizer, end_token_ids)
        self._context_tokens = options.context_tokens(config, max_context_tokens)
        self._all: list[Member] = []
        self._group: ServerGroup | None = None
        self._weights: WeightsFile | None = None
        self._weights_folder = Path(config.weights_folder) if config.weights_folder else None
        self._has_weights = False
        self._num_retried = 0
        self._loop = BackgroundLoop("vllm-servers")
        try:
            if config.addresses:
                self._all = given_members(config, rank=rank, num_ranks=num_ranks)
            else:
                self._group = start_group(
                    config, folder, log_folder=log_folder, dtype=dtype, device=device or torch.device("cpu"),
                    max_context_tokens=max_context_tokens, seed=seed, rank=rank,
                )  # fmt: skip
                self._all = own_members(self._group)
            self._join()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ protocol
    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order; greedy at temperature 0, with log-probabilities at temperature 1.

        Raises DataError for a prompt that is empty or leaves no room for one token, NonFinite when the model gives NaN,
        RolloutUnavailable when no server is left, RuntimeError before the first `load_weights`."""
        return self._sample(requests, sampling)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Give every server full weights; completions that are being sampled go on under them.

        A server that fails gets no work until it has them. Raises RolloutUnavailable when no server is left."""
        update = None
        if any(member.ours_to_update for member in self._all):
            update = WeightsFile(weights, dtype=self._dtype, folder=self._weights_folder)
        else:
            deque(weights, maxlen=0)  # ranks read them together
        old, self._weights = self._weights, update
        version = f"{LAUNCH}-{next(UPDATES)}-{policy_version}"
        try:
            self._call(self._members.update(Weights(update.path if update else "", version, policy_version)))
        finally:
            if old is not None:
                old.close()
        self.policy_version = policy_version
        self._has_weights = True

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: servers that may be given work now, completions that went to another server,
        prompt tokens found in the servers' caches, and what they drafted."""
        before, self._num_retried = self._num_retried, self._dispatcher.num_retried
        metrics = as_metrics(self._call(self._members.count()))
        metrics["rollout/servers_ready"] = float(len(self._members.ready))
        metrics["rollout/requests_retried"] = float(self._num_retried - before)
        return metrics

    def close(self) -> None:
        """End our own servers and every connection. May be called again."""
        self._loop.close(self._disconnect)
        if self._group is not None:
            self._group.end()
        if self._weights is not None:
            self._weights.close()

    # ------------------------------------------------------------ more than the protocol
    def replicas(self) -> list[ServerReplica]:
        """Each server that may be given work, on its own."""
        return [ServerReplica(partial(self._sample, only=member)) for member in self._members.ready]

    def abort(self) -> None:
        """From another thread: end the calls of `sample` that are running. Completions come back as `aborted` with what
        they have, those that had not begun with nothing."""
        self._loop.call(self._dispatcher.abort(), _nothing)

    # ------------------------------------------------------------ inside
    def _join(self) -> None:
        config = self._config
        self._members = Members(
            self._all, health_interval_s=config.health_interval_s, start_timeout_s=config.start_timeout_s,
            patience_s=config.max_attempts * config.health_interval_s,
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            self._members, max_rows=config.max_rows, max_attempts=config.max_attempts,
            request_timeout_s=config.request_timeout_s,
        )  # fmt: skip
        context_tokens = self._loop.call(self._members.start(), _nothing)
        self._context_tokens = min(self._context_tokens, context_tokens or self._context_tokens)
        self._loop.start(self._members.watch())

    def _sample(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, only: Member | None = None
    ) -> list[Completion]:
        if not self._has_weights:
            raise RuntimeError("the servers hold no weights of the policy yet; load_weights comes before sample")
        jobs = [self._job(request, sampling) for request in requests]
        answers = self._call(self._dispatcher.complete(jobs, only))
        return [self._completions.make(sampled, sampling.stop, version) for sampled, version in answers]

    def _job(self, request: SampleRequest, sampling: SamplingConfig) -> Job:
        room = self._room(request)
        told = options.sampling_options(sampling, self._end_token_ids, room_tokens=room, stream=request.stream)
        told["prompt"] = request.prompt_ids
        return Job(told, told.pop("seed"), request.group, told["max_tokens"])

    def _room(self, request: SampleRequest) -> int:
        """Tokens that the context leaves for a completion."""
        length = len(request.prompt_ids)
        if length == 0:
            raise DataError(f"the prompt of group {request.group} has no tokens; give it a text")
        if length >= self._context_tokens:
            raise DataError(
                f"the prompt of group {request.group} has {length} tokens; vLLM's context of {self._context_tokens}"
                " leaves no room for one more; shorten or remove it"
            )
        return self._context_tokens - length

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.call(coroutine, self._start_again)
        except RequestRefused as error:
            raise RolloutUnavailable(str(error)) from error

    async def _disconnect(self) -> None:
        for member in self._all:
            await member.client.close()

    def _start_again(self) -> None:
        """Start those of our own servers again that ended, as often as that is allowed."""
        if threading.current_thread() is not threading.main_thread():
            return
        for member in self._all:
            process = member.process
            if process is not None and process.poll() is not None and process.may_start_again:
                fault = process.describe_end()
                process.start()
                self._loop.post(partial(self._members.started_again, member, fault))


@dataclass(frozen=True, slots=True)
class ServerReplica:
    """One server of a pool. Implements `protocols.Replica`."""

    sample: Callable[[Sequence[SampleRequest], SamplingConfig], list[Completion]]


def _nothing() -> None:
    """There is nothing to mind meanwhile."""
