"""Sampling with vLLM inside the engine's process.

    sampler = VLLMSampler(config, folder, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens)
    sampler.load_weights(learner.iter_full_weights(), version)     # before the first sample, too
    completions = sampler.sample(requests, sampling)

Each completion is a request of its own with the seed of its stream; vLLM's prefix cache prefills a shared prompt once.
The engine is driven step by step, so that another thread may load weights or abort between two steps: the requests in
flight go on under the new weights, as after vLLM's own pause(keep).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import VLLMRollout
from grpo_engine.errors import DataError
from grpo_engine.rollout.vllm import options
from grpo_engine.rollout.vllm.outputs import Completions, Sampled
from grpo_engine.rollout.vllm.turns import Turns
from grpo_engine.types import Completion, SampleRequest

if TYPE_CHECKING:
    from grpo_engine.rollout.vllm.engine import Engine


class VLLMSampler:
    """Implements `protocols.Sampler`. `sample` belongs to one thread; the other methods may be called from any.

    One at a time in a process: vLLM keeps its process groups in the module, and the first engine that ends takes them
    with it.

    With `config.sleep` the owner calls `sleep` before it trains; the next `load_weights` or `sample` wakes vLLM.
    """

    shares_weights = False

    def __init__(
        self,
        config: VLLMRollout,
        folder: Path,
        tokenizer: PreTrainedTokenizerFast,
        end_token_ids: Collection[int],
        max_context_tokens: int,
        *,
        dtype: str = "float32",
        device: torch.device | None = None,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        """Start vLLM on the model in `folder` (`folder.write_model_folder`); None as device is the CPU.

        Raises RolloutUnavailable where vLLM is not installed, is another release, or does not start."""
        options.require_vllm()
        self.policy_version = 0
        self._end_token_ids = frozenset(end_token_ids)
        self._completions = Completions(tokenizer, end_token_ids)
        self._context_tokens = options.context_tokens(config, max_context_tokens)
        self._has_weights = options.has_weights(folder)
        self._turns = Turns()
        on_cpu = device is None or device.type == "cpu"
        os.environ.update(options.environment(config, on_cpu=on_cpu, in_process=True))
        arguments = options.engine_options(
            config, folder, dtype=dtype, max_context_tokens=max_context_tokens, on_cpu=on_cpu, seed=seed
        )
        from grpo_engine.rollout.vllm.engine import Engine  # imports vLLM, which reads the environment

        self._engine: Engine | None = Engine(arguments, num_ranks)
        self._sleeps = config.sleep and not on_cpu

    @property
    def num_steps(self) -> int:
        """Forward passes so far."""
        return self._engine.num_steps if self._engine is not None else 0

    # ------------------------------------------------------------ protocol
    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order; greedy at temperature 0, with log-probabilities at temperature 1.

        Raises DataError for a prompt that is empty or leaves no room for one token, NonFinite when the model gives NaN,
        RuntimeError while vLLM holds no complete weights: before the first update, or after one that failed."""
        self._open()
        if not self._has_weights:
            raise RuntimeError("vLLM holds no complete weights; load_weights comes before sample")
        told = [self._told(request, sampling) for request in requests]
        with self._turns.turn():
            engine, version = self._open(), self.policy_version
            for index, (request, arguments) in enumerate(zip(requests, told, strict=True)):
                engine.add(index, request.prompt_ids, arguments, version)
        sampled: dict[int, Sampled] = {}
        try:
            while len(sampled) < len(requests):
                with self._turns.turn():
                    sampled |= self._open().step()
        except BaseException:
            with self._turns.turn():
                self._open().forget_requests()
            raise
        return [self._completions.make(sampled[index], sampling.stop, version) for index in range(len(requests))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take over full weights between two steps of whatever is being sampled, and forget what was cached of the old
        ones. Raises ValueError for a name that the model lacks and for a parameter that was not given."""
        with self._turns.turn():
            self._has_weights = False
            self._open().load(weights, policy_version)
            self._has_weights = True
            self.policy_version = policy_version

    def take_metrics(self) -> dict[str, float]:
        """Share of prompt tokens found in the cache, and with speculation what was drafted and accepted."""
        with self._turns.turn():
            return {} if self._engine is None else self._engine.take_metrics()

    def close(self) -> None:
        """End vLLM and free its memory. May be called again."""
        with self._turns.turn():
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    # ------------------------------------------------------------ beyond the protocol
    def abort(self) -> None:
        """End what is being sampled now: `sample` returns it as it is, finish reason aborted."""
        with self._turns.turn():
            self._open().abort()

    def sleep(self) -> None:
        """Free the cache and move the weights to the host, for a trainer on the same GPU. Nothing on the CPU."""
        with self._turns.turn():
            if self._sleeps:
                self._open().sleep()

    # ------------------------------------------------------------ requests
    def _open(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the sampler is closed")
        return self._engine

    def _told(self, request: SampleRequest, sampling: SamplingConfig) -> dict[str, object]:
        length = len(request.prompt_ids)
        if length == 0:
            raise DataError(f"the prompt of group {request.group} has no tokens; give it a text")
        room = self._context_tokens - length
        if room <= 0:
            raise DataError(
                f"the prompt of group {request.group} has {length} tokens; the context of {self._context_tokens} that"
                " vLLM was started with leaves no room for one more; shorten or remove it"
            )
        return options.sampling_options(sampling, self._end_token_ids, room_tokens=room, stream=request.stream)
