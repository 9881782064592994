"""The torch sampler with drafts, on real models: same completions, exact probabilities, the policy's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import MTPDrafts, NgramDrafts
from grpo_engine.model.mtp import MTPHeads
from grpo_engine.rollout.mtp_drafter import MTPDrafter
from grpo_engine.rollout.speculation import Speculator, make_speculator
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import Completion, SampleRequest
from tests.unit.speculation_fakes import deviation, distribution
from tests.unit.tiny_models import TOKENIZER, tiny_model

PROMPTS = ["7+5=", "347+285=347+28", "1", "12*(3+4)=", "abababab"]
END = torch.tensor([2])
MODELS: dict[str, Any] = {family: tiny_model(family) for family in ("llama", "mistral", "gpt2", "gemma2")}


def by_ngrams(fixed: int | None = 3, **options: Any) -> Speculator | None:
    return make_speculator(NgramDrafts(fixed_tokens=fixed, min_match=1), END, **options)


def by_heads(family: str, fixed: int | None = 3) -> Speculator | None:
    drafter = MTPDrafter(MTPHeads(MODELS[family], 2, seed=1), MODELS[family], 5)
    return make_speculator(MTPDrafts(fixed_tokens=fixed), END, drafter)


def sampled(
    speculator: Speculator | None, family: str = "llama", prompts: Sequence[str] = PROMPTS, copies: int = 3,
    context: int = 64, rows: int = 256, **values: Any,
) -> list[Completion]:  # fmt: skip
    requests = [
        SampleRequest(TOKENIZER(prompt).input_ids, (3, index, copy), str(index))
        for index, prompt in enumerate(prompts)
        for copy in range(copies)
    ]
    sampler = TorchSampler(MODELS[family], TOKENIZER, {2}, context, rows, speculator=speculator)
    return sampler.sample(requests, SamplingConfig.model_validate({"max_new_tokens": 24, **values}))


def without_numbers(completion: Completion) -> Completion:
    return replace(completion, logprobs=[], full_logprobs=[])


# ---------------------------------------------------------------- drafts made with certainty
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("mistral", {"temperature": 0.7, "top_k": 4}),
        ("gpt2", {"top_p": 0.9}),
        ("gemma2", {"temperature": 0}),
    ],
)
def test_completions_are_those_of_plain_decoding(family: str, values: dict[str, Any]) -> None:
    speculator = by_ngrams()
    plain, drafted = sampled(None, family, **values), sampled(speculator, family, **values)
    assert [without_numbers(completion) for completion in drafted] == [without_numbers(each) for each in plain]
    for one, other in zip(drafted, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.full_logprobs == pytest.approx(other.full_logprobs, abs=1e-4)
    assert speculator is not None
    assert speculator.take_metrics()["rollout/accepted_share"] > 0


@pytest.mark.parametrize(("family", "fixed"), [("mistral", 2), ("gpt2", 5)])
def test_rows_that_reach_the_context_or_wait_for_a_place_stay_the_same(family: str, fixed: int) -> None:
    plain = sampled(None, family, context=20, rows=4, temperature=0.8)
    drafted = sampled(by_ngrams(fixed), family, context=20, rows=4, temperature=0.8)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    assert any(completion.finish_reason == "length" for completion in plain)


def test_a_stop_text_inside_a_draft_ends_the_completion_there() -> None:
    plain, drafted = sampled(None, stop=["1", "+"]), sampled(by_ngrams(5), stop=["1", "+"])
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    assert any(completion.text.endswith(("1", "+")) for completion in drafted)


# ---------------------------------------------------------------- drafts sampled from the heads
def test_heads_do_not_change_greedy_completions() -> None:
    plain, drafted = sampled(None, temperature=0), sampled(by_heads("llama"), temperature=0)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]


def test_with_heads_completions_come_with_their_exact_probability() -> None:
    """All of three tokens, of which the last two are drafted and verified."""
    sampling = SamplingConfig(temperature=1.3, top_k=3, max_new_tokens=3)
    values: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "max_new_tokens": 3}
    completions = sampled(by_heads("llama", 2), prompts=["7+5="], copies=2000, rows=2000, **values)
    seen = Counter(tuple(completion.token_ids) for completion in completions)
    exact = completion_probabilities(TOKENIZER("7+5=").input_ids, sampling)
    assert set(seen) <= set(exact)
    assert len(exact) > 20
    assert deviation([seen[tokens] for tokens in exact], list(exact.values())) < 5


def completion_probabilities(prompt: list[int], sampling: SamplingConfig) -> dict[tuple[int, ...], float]:
    """By plain forward passes over every prefix that can come."""
    model = MODELS["llama"].eval()
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_new_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in known.items():
            if tokens[-1:] == (2,):
                longer[tokens] = probability
                continue
            with torch.no_grad():
                next_V = distribution(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1:], sampling)[0]
            longer |= {
                (*tokens, token): probability * float(next_V[token]) for token in next_V.nonzero()[:, 0].tolist()
            }
        known = longer
    model.train()
    return known


@pytest.mark.parametrize("values", [{"temperature": 0.7, "top_k": 4}, {}])
def test_with_heads_log_probabilities_are_the_policys(values: dict[str, Any]) -> None:
    completions = sampled(by_heads("mistral"), "mistral", **values)
    temperature = values.get("temperature", 1.0)
    model = MODELS["mistral"].eval()
    for index, completion in enumerate(completions):
        prompt = TOKENIZER(PROMPTS[index // 3]).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1] / temperature
        exact = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.full_logprobs == pytest.approx(exact.tolist(), abs=1e-4)
        for step, kept in enumerate(completion.kept_ids or []):
            token = kept.index(completion.token_ids[step])
            assert completion.logprobs[step] == pytest.approx(
                float(logits[step, kept].log_softmax(-1)[token]), abs=1e-4
            )
    model.train()


# ---------------------------------------------------------------- the sampler as a whole
@pytest.mark.parametrize("by", ["ngrams", "heads"])
def test_a_sampler_that_learns_its_draft_length_completes_every_request(by: str) -> None:
    speculator = by_ngrams(None) if by == "ngrams" else by_heads("llama", None)
    completions = sampled(speculator, copies=6, rows=16)
    assert len(completions) == 30
    assert all(0 < len(completion.token_ids) <= 24 for completion in completions)
    assert speculator is not None
    told = speculator.take_metrics()
    assert told["rollout/tokens_per_forward"] >= 1
    assert told["rollout/drafted_tokens"] > 0


def test_a_draft_length_is_chosen_by_the_rows_and_the_longest_of_them() -> None:
    speculator, told = by_ngrams(), list[tuple[int, int]]()
    assert speculator is not None
    speculator.choose_length = lambda *size: told.append(size) or 0  # type: ignore[func-returns-value, assignment, method-assign]
    completions = sampled(speculator, copies=2, max_new_tokens=3)
    longest = max(len(TOKENIZER(prompt).input_ids) for prompt in PROMPTS)
    assert all(len(completion.token_ids) == 3 for completion in completions)
    assert told == [(2 * len(PROMPTS), longest + 1), (2 * len(PROMPTS), longest + 2)]


def test_deterministic_drafts_give_the_same_completions_again() -> None:
    first, again = (sampled(by_ngrams(None, deterministic=True), copies=2, rows=4, max_new_tokens=9) for _ in range(2))
    assert first == again
