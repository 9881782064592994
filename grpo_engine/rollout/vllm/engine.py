"""vLLM's engine in this process: start, step, update, end. The only file of the engine's own that drives vLLM.

Import it after `options.environment` was set: vLLM reads the environment when it is imported.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.metrics import SpeculationCounts, speculation_counts
from grpo_engine.rollout.vllm.options import ALL_KEPT
from grpo_engine.rollout.vllm.outputs import Sampled, read_truncated, read_untruncated


class Engine:
    """Not safe to use from several threads at once (`turns`)."""

    def __init__(self, arguments: Mapping[str, Any], num_ranks: int) -> None:
        """`arguments` as `options.engine_options`. Raises RolloutUnavailable when vLLM does not start."""
        self.num_steps = 0
        self._next_id = 0
        self._running: dict[str, tuple[int, bool]] = {}
        self._aborted: dict[int, Sampled] = {}
        self._asleep = False
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._speculates = "speculative_config" in arguments
        self._vllm: Any = _start(arguments, num_ranks, log_stats=self._speculates)
        self._counts = self._speculation_counts()
        self._vllm.collective_rpc("init_weight_transfer_engine", args=({},))

    # ------------------------------------------------------------ sampling
    def add(self, index: int, prompt_ids: Sequence[int], arguments: Mapping[str, Any], version: int) -> None:
        """Queue one completion, to be known as `index`; `arguments` as `options.sampling_options`."""
        self.wake()
        params = SamplingParams(
            **arguments,
            detokenize="stop" in arguments,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # they are this request's alone, so vLLM need not copy them deeply
        )
        # The salt keeps blocks of other weights from being found, whatever becomes of the reset.
        prompt = tokens_input(list(prompt_ids), cache_salt=str(version))
        name = str(self._next_id)
        self._next_id += 1
        self._running[name] = index, arguments["logprobs"] == ALL_KEPT
        self._vllm.add_request(name, prompt, params)

    def step(self) -> dict[int, Sampled]:
        """One forward pass of what is queued; what ended with it, or was aborted before it, by index."""
        ended, self._aborted = self._aborted, {}
        if self._vllm.has_unfinished_requests():
            self.num_steps += 1
            for output in self._vllm.step():
                self._num_prompt_tokens += len(output.prompt_token_ids)
                self._num_cached_tokens += output.num_cached_tokens or 0
                [completion] = output.outputs
                index, truncated = self._running.pop(output.request_id)
                ended[index] = _sampled(
                    completion.token_ids, completion.logprobs, completion.finish_reason, truncated=truncated
                )
        return ended

    def abort(self) -> None:
        """End everything queued; the next step returns it as far as it came."""
        states = self._vllm.output_processor.request_states
        for state in list(states.values()):
            index, truncated = self._running.pop(state.external_req_id)
            tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            self._aborted[index] = _sampled(tokens, logprobs, "abort", truncated=truncated)
        self._vllm.abort_request(list(states), internal=True)

    def forget_requests(self) -> None:
        """After an error in the middle of sampling."""
        self.abort()
        self._running, self._aborted = {}, {}

    # ------------------------------------------------------------ weights
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights and drop what was cached; requests in flight are computed again under the new ones."""
        self.wake()
        self._vllm.collective_rpc("start_weight_update")
        try:
            self._vllm.collective_rpc("update_weights", kwargs={"update_info": {"weights": weights}})
            self._vllm.collective_rpc("finish_weight_update")
        finally:
            self._vllm.reset_prefix_cache(reset_running_requests=True)
        self._vllm.set_weight_version(str(version))

    def sleep(self) -> None:
        if not self._asleep:
            self._vllm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._vllm.wake_up()
            self._asleep = False

    # ------------------------------------------------------------ the rest
    def take_metrics(self) -> dict[str, float]:
        metrics = {}
        if self._num_prompt_tokens:
            metrics["rollout/cached_prompt_share"] = self._num_cached_tokens / self._num_prompt_tokens
            self._num_prompt_tokens = self._num_cached_tokens = 0
        counts = self._speculation_counts()
        metrics |= counts.since(self._counts)
        self._counts = counts
        return metrics

    def close(self) -> None:
        """End the engine and free its memory."""
        self._vllm.engine_core.shutdown()
        del self._vllm
        gc.collect()

    def _speculation_counts(self) -> SpeculationCounts:
        """vLLM counts them for the process, other engines in it included."""
        return speculation_counts(self._vllm.get_metrics() if self._speculates else ())


def _start(arguments: Mapping[str, Any], num_ranks: int, *, log_stats: bool) -> Any:
    # Several ranks have their process group already, and each is an engine of its own in it.
    executor = "uni" if num_ranks == 1 else "external_launcher"
    with _trainer_untouched():
        try:
            from grpo_engine.rollout.vllm.cpu_fixes import mend_start  # of vLLM's insides, which may be others

            mend_start()
            told = EngineArgs(**arguments, distributed_executor_backend=executor, disable_log_stats=not log_stats)
            return LLMEngine.from_engine_args(told, usage_context=UsageContext.LLM_CLASS)
        except RolloutUnavailable:
            raise
        except Exception as error:  # vLLM raises a dozen types
            raise RolloutUnavailable(f"vLLM did not start: {_first_line(error)}") from error


def _sampled(token_ids: Sequence[int], logprobs: Any, finish: str | None, *, truncated: bool) -> Sampled:
    """From vLLM's FlatLogprobs: the entries of all tokens in two lists, and where each token's begin and end."""
    tokens = list(token_ids)
    if not truncated:
        return read_untruncated(tokens, list(logprobs.logprobs[: len(tokens)]), finish)
    bounds = zip(logprobs.start_indices[: len(tokens)], logprobs.end_indices, strict=False)
    entries = [(logprobs.token_ids[start:end], logprobs.logprobs[start:end]) for start, end in bounds]
    return read_truncated(tokens, entries, finish)


@contextmanager
def _trainer_untouched() -> Iterator[None]:
    """vLLM seeds every generator of the process, and on the CPU sets the number of threads and takes away the function
    that does so."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
