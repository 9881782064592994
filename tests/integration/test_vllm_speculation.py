"""Speculation of vLLM on the CPU samples what it should, with the repairs of cpu_fixes; one test pins a fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_engine.rollout.vllm.sampler import VLLMSampler
from grpo_engine.types import Completion, SampleRequest
from tests.sampling import requests, settings
from tests.vllm_models import of_vllm, plain_logits, start_vllm, vllm_model, worst_gap

pytestmark = of_vllm
PROMPTS = ["abababababababab", "7+5=12;7+5=12;7+5=", "12", "x=y;y=x;x=y;"]
NGRAM: dict[str, Any] = {"method": "ngram", "num_tokens": 3, "max_match": 3, "min_match": 1}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return vllm_model("llama")


@pytest.fixture(scope="module")
def sampler(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMSampler]:
    made = start_vllm(model, tmp_path_factory.mktemp("ngram"), speculation=NGRAM)
    yield made
    made.close()


def surprise(
    model: PreTrainedModel, asked: list[SampleRequest], completions: list[Completion], t: float
) -> list[float]:
    """Negative log-likelihood less entropy of each token: its mean is 0 when the distribution is the right one."""
    excess = []
    for request, completion in zip(asked, completions, strict=True):
        logits = plain_logits(model, request.prompt_ids, completion) / t
        for row, token, kept in zip(
            logits, completion.token_ids, completion.kept_ids or [list(range(logits.shape[-1]))] * 99, strict=False
        ):
            logprobs = row[kept].log_softmax(-1)
            excess.append(float((logprobs.exp() * logprobs).sum() - logprobs[kept.index(token)]))
    return excess


@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_p": 0.8}])
def test_speculation_follows_the_policys_distribution(
    sampler: VLLMSampler, model: PreTrainedModel, truncation: dict[str, float]
) -> None:
    sampler.take_metrics()
    asked = requests(PROMPTS, 24)
    completions = sampler.sample(asked, settings(temperature=0.6, max_new_tokens=40, **truncation))
    metrics = sampler.take_metrics()
    assert metrics["rollout/drafted_tokens"] > 200
    assert metrics["rollout/accepted_share"] > 0.02
    excess = torch.tensor(surprise(model, asked, completions, 0.6))
    assert abs(float(excess.mean())) < 4.5 * float(excess.std()) / len(excess) ** 0.5


@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_k": 9, "top_p": 0.9}])
def test_log_probabilities_of_drafted_tokens_are_the_policys(
    sampler: VLLMSampler, model: PreTrainedModel, truncation: dict[str, float]
) -> None:
    asked = requests(PROMPTS, 3)
    completions = sampler.sample(asked, settings(temperature=0.7, **truncation))
    assert worst_gap(model, asked, completions, 0.7) <= 1e-4
    assert all(len(c.kept_ids or []) == (len(c.token_ids) if truncation else 0) for c in completions)


def test_prompts_computed_in_parts_beside_drafts_follow_the_policy(
    sampler: VLLMSampler, model: PreTrainedModel
) -> None:
    """More prompts than a step takes, while shorter ones decode with drafts."""
    asked = requests(PROMPTS + [f"{index:03} " + "the quick brown fox " * 11 for index in range(36)])
    completions = sampler.sample(asked, settings(temperature=0.7, top_k=4))
    assert worst_gap(model, asked, completions, 0.7) <= 1e-4


def test_greedy_speculation_chooses_the_likeliest(sampler: VLLMSampler, model: PreTrainedModel) -> None:
    asked = requests(PROMPTS)
    for request, completion in zip(asked, sampler.sample(asked, settings(temperature=0)), strict=True):
        assert completion.token_ids == plain_logits(model, request.prompt_ids, completion).argmax(-1).tolist()


def test_a_stop_text_inside_a_draft_ends_the_completion_there(sampler: VLLMSampler) -> None:
    completions = sampler.sample(requests(PROMPTS, 8), settings(temperature=1.0, stop=["+", "7", "="]))
    for completion in completions:
        assert not {"+", "7", "="} & set(completion.text[:-1])
        assert (completion.finish_reason == "stop") == (completion.text[-1:] in {"+", "7", "="})
        assert len(completion.token_ids) == len(completion.logprobs)


def test_steps_without_any_draft_work(sampler: VLLMSampler) -> None:
    """Top-k over no rows; the last token of a one-token completion is never drafted."""
    completions = sampler.sample(requests(["abcdefgh"], 2), settings(top_k=4, max_new_tokens=2))
    assert [len(c.token_ids) for c in completions] == [2, 2]


def test_values_are_repeated_for_each_drafted_token() -> None:
    """And vLLM's kernel still leaves its output as it was: when this fails, cpu_fixes may go."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    from grpo_engine.rollout.vllm.cpu_fixes import expanded

    values, ends = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expanded(values, ends, 5, 0, 1).tolist() == pytest.approx([0.7, 0.7, 1.5, 1.5, 1.5])
    assert expanded(torch.tensor([0, 4]), torch.tensor([1, 3]), 3, 0, 1).tolist() == [1, 4, 4]
    output = torch.full((5,), -1.0)
    _expand_kernel_impl(output, values, ends, 0, 1)
    assert output.tolist() == [-1.0] * 5


def test_an_engine_starts_where_numba_was_used_and_vllm_still_needs_help_with_it(tmp_path: Path) -> None:
    """llvmlite's library calls a function its dictionary: when this fails, `mend_start` may go."""
    import llvmlite.binding

    from grpo_engine.rollout.vllm.cpu_fixes import attributes

    fault = llvmlite.binding.ffi.lib
    assert not hasattr(vars(fault), "items")
    assert attributes(fault) == {}
    assert "kernel" in attributes(SimpleNamespace(kernel=3))
    start_vllm(vllm_model("llama"), tmp_path).close()
