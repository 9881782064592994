"""The torch sampler against plain full forwards, model.generate and the exact distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_engine.errors import DataError, NonFinite
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.packing import collate
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import Completion, SampleRequest, TrainRow
from tests.sampling import requests, settings
from tests.unit.tiny_models import TOKENIZER, tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "gpt2", "untied", "gemma2", "bloom", "wide")
MODELS = {family: tiny_model(family) for family in FAMILIES}
PROMPTS = ["7+5=", "347+285=", "1", "12*(3+4)=", "abcdefghij", "x=y;"]
NO_END = frozenset({999})


def sampler(
    family: str = "llama", ends: frozenset[int] = frozenset({2}), context: int = 64, **options: Any
) -> TorchSampler:
    return TorchSampler(MODELS[family], TOKENIZER, ends, context, **options)


def full_logits(model: PreTrainedModel, prompt_ids: list[int], completion: Completion) -> torch.Tensor:
    """[T, V] by one plain forward without cache, padding or batch."""
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + completion.token_ids])).logits[0].float()
    model.train()
    return torch.as_tensor(logits[len(prompt_ids) - 1 : -1])


def chosen(logits: torch.Tensor, completion: Completion) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


# ---------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_a_plain_full_forward(family: str, temperature: float) -> None:
    asked = requests(PROMPTS, 4)
    completions = sampler(family).sample(asked, settings(temperature=temperature))
    for request, completion in zip(asked, completions, strict=True):
        exact = chosen(full_logits(MODELS[family], request.prompt_ids, completion) / temperature, completion)
        assert (torch.tensor(completion.full_logprobs) - exact).abs().max() < 1e-4
        assert completion.logprobs == completion.full_logprobs
    assert len({len(completion.token_ids) for completion in completions}) > 1


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 4, "temperature": 0.7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}],
)
def test_truncated_log_probabilities_are_renormalised_over_the_kept_ids(filters: dict[str, float]) -> None:
    asked = requests(PROMPTS, 2)
    for request, completion in zip(asked, sampler("mistral").sample(asked, settings(**filters)), strict=True):
        logits = full_logits(MODELS["mistral"], request.prompt_ids, completion) / filters.get("temperature", 1.0)
        assert completion.kept_ids is not None
        assert len(completion.kept_ids) == len(completion.token_ids)
        for step, kept in enumerate(completion.kept_ids):
            token = kept.index(completion.token_ids[step])
            renormalised = logits[step, kept].log_softmax(-1)[token].item()
            assert completion.logprobs[step] == pytest.approx(renormalised, abs=1e-4)
        assert (torch.tensor(completion.full_logprobs) - chosen(logits, completion)).abs().max() < 1e-4


def test_without_truncation_there_are_no_kept_ids() -> None:
    assert sampler().sample(requests(["1"]), settings())[0].kept_ids is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ratio_of_an_untouched_policy_is_one(family: str) -> None:
    """Against what the learner computes, for the sampling of R1."""
    asked = requests(PROMPTS, 4)
    completions = sampler(family).sample(asked, settings(temperature=0.7, top_k=4))
    forward = LogprobForward(MODELS[family])
    rows = [TrainRow(r.prompt_ids, c.token_ids, kept_ids=c.kept_ids) for r, c in zip(asked, completions, strict=True)]
    batch = collate(rows, device=torch.device("cpu"), packed=forward.packed)
    with torch.no_grad():
        policy = forward(batch, 0.7).policy
    sampled = torch.tensor([logprob for c in completions for logprob in c.logprobs])
    assert ((policy - sampled).exp() - 1).abs().max() < 1e-3


# ---------------------------------------------------------------- tokens
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    asked = requests(PROMPTS)
    completions = sampler(family).sample(asked, settings(temperature=0))
    model = MODELS[family].eval()
    for request, completion in zip(asked, completions, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        assert output[0, len(request.prompt_ids) :].tolist() == completion.token_ids


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.7, "temperature": 1.5}])
def test_first_tokens_follow_the_exact_distribution(filters: dict[str, float]) -> None:
    """Chi-square over the cells with at least 5 expected; the bound is mean + 5 standard deviations."""
    count = 2000
    asked = [SampleRequest([13, 16], (1, copy), "0") for copy in range(count)]
    completions = sampler(max_rows=count).sample(asked, settings(**filters, max_new_tokens=1))
    logits = full_logits(MODELS["llama"], [13, 16], completions[0])[0] / filters.get("temperature", 1.0)
    kept = (completions[0].kept_ids or [list(range(len(logits)))])[0]
    probabilities = torch.zeros(len(logits), dtype=torch.float64)
    probabilities[kept] = logits[kept].double().softmax(-1)
    observed = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=len(logits))
    expected = probabilities * count
    cells = expected >= 5
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum().item()
    freedom = int(cells.sum()) - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert observed[probabilities == 0].sum() == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_tokens_do_not_depend_on_batch_or_order(family: str) -> None:
    asked = requests(PROMPTS, 3)
    engine = sampler(family)
    together = engine.sample(asked, settings())
    alone = [engine.sample([request], settings())[0] for request in asked[::4]]
    reversed_order = engine.sample(asked[::-1], settings())[::-1]
    small = sampler(family, max_rows=4).sample(asked, settings())
    tokens = [completion.token_ids for completion in together]
    assert len(set(map(tuple, tokens))) > 10
    assert [completion.token_ids for completion in alone] == tokens[::4]
    for other in (reversed_order, small):
        assert [completion.token_ids for completion in other] == tokens


def test_sampling_is_repeatable_and_every_stream_differs() -> None:
    first, again = (sampler().sample(requests(["7+5="], 8), settings()) for _ in range(2))
    assert first == again
    assert len({tuple(completion.token_ids) for completion in first}) == 8
    other_seed = sampler().sample(requests(["7+5="], 8, seed=1), settings())
    assert [c.token_ids for c in other_seed] != [c.token_ids for c in first]


def test_a_larger_budget_only_continues_the_completion() -> None:
    short = sampler(ends=NO_END).sample(requests(PROMPTS), settings(max_new_tokens=6))
    long = sampler(ends=NO_END).sample(requests(PROMPTS), settings(max_new_tokens=20))
    assert [c.token_ids for c in short] == [c.token_ids[:6] for c in long]


# ---------------------------------------------------------------- ends
def test_every_end_token_ends_a_completion_and_is_part_of_it() -> None:
    ends = frozenset({2, 9, 14, 30})
    completions = sampler(ends=ends).sample(requests(PROMPTS, 20), settings(max_new_tokens=50))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert {completion.token_ids[-1] for completion in stopped} == ends
    for completion in completions:
        assert not ends & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")


def test_a_completion_of_the_end_token_alone_has_length_one_and_no_text() -> None:
    everything = frozenset(range(len(TOKENIZER)))
    for completion in sampler(ends=everything).sample(requests(PROMPTS), settings()):
        assert (len(completion.token_ids), completion.text, completion.finish_reason) == (1, "", "stop")
        assert len(completion.logprobs) == len(completion.full_logprobs) == len(completion.token_texts) == 1


def test_the_budget_ends_a_completion_as_length() -> None:
    completions = sampler(ends=NO_END).sample(requests(PROMPTS), settings(max_new_tokens=1))
    assert [(len(c.token_ids), c.finish_reason) for c in completions] == [(1, "length")] * len(PROMPTS)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("wide", "untied")])
def test_completions_fill_the_context_and_no_more(family: str) -> None:
    engine = sampler(family, ends=NO_END, context=64)
    for prompt, completion in zip(PROMPTS, engine.sample(requests(PROMPTS), settings(max_new_tokens=500)), strict=True):
        assert len(completion.token_ids) == 64 - len(prompt)
        assert completion.finish_reason == "length"


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    (completion,) = sampler(context=10).sample(requests(["123456789"]), settings())
    assert len(completion.token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "group 0 has no tokens"), ("1234567890", "group 0 has 10 tokens")]
)
def test_a_prompt_without_room_is_refused_by_name(prompt: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sampler(context=10).sample(requests([prompt]), settings())


def test_stop_texts_end_a_completion_and_stay_in_it() -> None:
    asked = requests(PROMPTS, 10)
    free = sampler(ends=NO_END).sample(asked, settings())
    stops = ["".join(free[3].token_texts[4:7]), free[8].token_texts[2]]
    for before, after in zip(free, sampler(ends=NO_END).sample(asked, settings(stop=stops)), strict=True):
        cut = min((before.text.find(stop) + len(stop) for stop in stops if stop in before.text), default=None)
        assert after.text == before.text[:cut]
        assert after.finish_reason == ("length" if cut is None else "stop")
        assert after.logprobs == pytest.approx(before.logprobs[: len(after.token_ids)], abs=1e-4)


def test_a_model_with_more_ids_than_the_tokenizer_is_sampled_as_it_is() -> None:
    completions = sampler("wide", ends=NO_END).sample(requests(PROMPTS, 5), settings())
    unknown = [t for c in completions for t, text in zip(c.token_ids, c.token_texts, strict=True) if text == ""]
    assert unknown
    assert min(unknown) >= len(TOKENIZER)


def test_no_requests_give_no_completions() -> None:
    assert sampler().sample([], settings()) == []


# ---------------------------------------------------------------- records
def test_text_and_token_texts_keep_special_tokens_and_drop_the_end() -> None:
    for completion in sampler().sample(requests(PROMPTS, 10), settings()):
        shown = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        assert completion.text == TOKENIZER.decode(shown) == "".join(completion.token_texts[: len(shown)])
    assert any("<think>" in c.text for c in sampler().sample(requests(PROMPTS, 10), settings()))


def test_greedy_log_probabilities_are_those_at_temperature_one() -> None:
    (completion,) = sampler().sample(requests(["7+5="]), settings(temperature=0, top_k=3))
    exact = chosen(full_logits(MODELS["llama"], TOKENIZER("7+5=").input_ids, completion), completion)
    assert (torch.tensor(completion.full_logprobs) - exact).abs().max() < 1e-4
    assert all(a >= b for a, b in zip(completion.logprobs, completion.full_logprobs, strict=True))


def test_logits_that_are_no_numbers_are_not_sampled_from() -> None:
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFinite, match="not finite"):
        TorchSampler(broken, TOKENIZER, {2}, 64).sample(requests(PROMPTS), settings())


def test_the_shared_module_stays_as_the_learner_left_it() -> None:
    model = MODELS["gpt2"].train()
    sampler("gpt2").sample(requests(["1"]), settings())
    assert model.training
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    model.zero_grad()
