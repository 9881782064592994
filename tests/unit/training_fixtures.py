"""Small models, rows and ranks for the tests of training, inference and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Barrier, Lock, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.communicator import SingleRank
from grpo_engine.config_training import ClipLoss, KLConfig, MemoryConfig, OptimizerConfig, ValueConfig
from grpo_engine.model.value import ValueModel
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import Objective, PolicyObjective
from grpo_engine.types import TOKENS, Normalizer, StepResult, TrainRow, global_denominator

T = TypeVar("T")
ONE_AT_A_TIME = Lock()
"""Ranks that are threads draw their weights from the one global generator."""
VOCABULARY = 23
POLICY = PolicyObjective(temperature=0.7, loss=ClipLoss(clip_high=0.28), kl=KLConfig(weight=0.1))
ALL_TOKENS = 1000
"""A token limit that holds all rows of a test."""


def tiny_llama(*, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Two layers of width 16; large initial weights, so that the distributions are far from uniform."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0}
    config = LlamaConfig(**(settings | {"bos_token_id": None, "eos_token_id": 1} | options))
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def ragged_rows(count: int = 7, *, seed: int = 0, kept: bool = False, **fields: Any) -> list[TrainRow]:
    """Rows of unequal lengths; log-probabilities, advantages, values and masks are random but plausible."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(1, 6))]
        completion = [draw.randrange(0, VOCABULARY) for _ in range(draw.randrange(1, 9))]
        noise = [draw.gauss(-2.5, 0.4) for _ in completion]
        values: dict[str, Any] = {
            "advantage": draw.gauss(0, 1),
            "rollout_logprobs": noise,
            "old_logprobs": [value + draw.gauss(0, 0.3) for value in noise],
            "ref_logprobs": [value + draw.gauss(0, 0.3) for value in noise],
            "loss_mask": [draw.random() < 0.8 for _ in completion],
            "kept_ids": [sorted({token, *draw.sample(range(VOCABULARY), 4)}) for token in completion] if kept else None,
            "returns": [draw.gauss(0.5, 1) for _ in completion],
            "old_values": [draw.gauss(0, 0.3) for _ in completion],
        }
        rows.append(TrainRow(prompt, completion, **(values | fields)))
    return rows


def masked_out(rows: Sequence[TrainRow]) -> list[TrainRow]:
    return [replace(row, loss_mask=[False] * len(row.completion_ids)) for row in rows]


# ---------------------------------------------------------------- learners
def learner(model: LlamaForCausalLM, objective: Objective | None = None, **options: Any) -> TorchLearner:
    """A learner with KL in the loss, temperature 0.7 and micro-batches of about three rows.

    `optimizer` and `memory` are fields of those configs; `value` those of ValueConfig, and the learner has a critic."""
    optimizer = OptimizerConfig(**({"learning_rate": 1e-2} | options.pop("optimizer", {})))
    memory = MemoryConfig(**({"max_micro_batch_tokens": 24} | options.pop("memory", {})))
    settings: dict[str, Any] = {"num_steps": 10, "dtype": "float32", "pad_token_id": 0, "communicator": SingleRank()}
    if "value" in options:
        config = ValueConfig(**options.pop("value"))
        critic = ValueModel(model, config.backbone, options.get("dtype", "float32"))
        settings |= {"value": critic, "value_config": config}
    return TorchLearner(model, optimizer, objective=objective or POLICY, memory=memory, **(settings | options))


def update(trainer: TorchLearner, rows: Sequence[TrainRow], normalizer: Normalizer = TOKENS) -> StepResult:
    """One optimizer step on all of `rows`."""
    trainer.accumulate(rows, global_denominator(rows, normalizer))
    return trainer.step()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], relative: float = 1e-9) -> None:
    """Largest difference of any entry, relative to the largest entry of all; a tensor that only one has counts as 0."""
    largest = max(float(tensor.abs().max()) for tensor in (*one.values(), *other.values()))
    zero = torch.zeros(())
    worst = max(float((one.get(n, zero) - other.get(n, zero)).abs().max()) for n in one.keys() | other.keys())
    assert worst <= relative * largest, f"{worst} of {largest}"


# ---------------------------------------------------------------- ranks
class ThreadRanks:
    """One of several ranks that are threads of this process; implements protocols.Communicator in lockstep."""

    def __init__(self, rank: int, barrier: Barrier, board: list[Any]) -> None:
        self.rank, self.world_size = rank, len(board)
        self._barrier, self._board = barrier, board

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait(60)
        values = list(self._board)
        self._barrier.wait(60)
        return values

    def from_first(self, value: T) -> T:
        return self.gather(value)[0]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))

    def max_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor.clone())).amax(0))


def on_ranks(count: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each of `count` ranks; the first error of any of them is raised here."""
    barrier, board = Barrier(count), [None] * count
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, barrier, board))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]
