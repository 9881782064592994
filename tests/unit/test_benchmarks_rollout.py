"""What the rollout benchmark computes itself: texts, models set by hand, requests, verdicts. Nothing is measured."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import (
    counting_text,
    gpu_rollout,
    peers,
    rollout,
    rollout_decode,
    rollout_models,
    rollout_mtp,
    rollout_setup,
    rollout_step,
    rollout_vllm,
    sample_ours,
    sampling_jobs,
    trl_step,
)
from benchmarks.results import Row
from benchmarks.standing import Job, Standing
from grpo_engine.config import RunConfig


# ---------------------------------------------------------------- claims
def test_the_claim_ids_are_those_of_the_issue_and_what_c_brings() -> None:
    assert rollout.arguments([]).claims == [
        "decode_small", "decode_short", "decode_shared_prompt", "decode_in_c", "decode_vs_vllm", "decode_skewed",
        "whole_step", "whole_step_bf16", "mtp_long", "mtp_large_batch", "vllm_overhead", "vllm_two_servers",
        "weight_update",
    ]  # fmt: skip


def test_every_claim_is_measured_by_exactly_one_function() -> None:
    modules = (rollout_decode, rollout_mtp, rollout_step, rollout_vllm)
    found = {claim: sum(callable(getattr(module, claim, None)) for module in modules) for claim in rollout.CLAIMS}
    assert found == dict.fromkeys(rollout.CLAIMS, 1)


def test_a_claim_that_fails_costs_no_other_claim_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(setup: rollout_setup.Setup) -> list[Row]:
        raise RuntimeError("ended with 1")

    monkeypatch.setattr(rollout_decode, "decode_small", fails)
    monkeypatch.setattr(rollout_decode, "decode_short", lambda setup: [Row("decode_short", 2, 1, "u", "l")])
    rows, failed, trl = rollout.measure(["decode_small", "decode_short"], rollout_setup.Setup())
    assert ([row.claim for row in rows], failed, trl) == (["decode_short"], ["decode_small"], None)


@pytest.mark.parametrize("parse", [rollout.arguments, gpu_rollout.arguments])
def test_a_claim_that_does_not_exist_is_refused_by_name(parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(parse)
    with pytest.raises(SystemExit):
        parse(["--only", "decode_fast"])
    assert "decode_fast" in capsys.readouterr().err


def test_the_gpu_benchmark_offers_peers_only_where_they_are_wanted() -> None:
    assert "whole_step" in gpu_rollout.arguments([]).claims
    assert "whole_step" not in gpu_rollout.arguments(["--without-peers"]).claims
    assert gpu_rollout.told(Row("mtp_long", 2, 1, "u", "l", goal=1.8)).claim == "gpu_mtp_long"


def test_the_worse_of_two_rows_carries_the_claim_and_tells_of_the_other() -> None:
    rows = [Row("a", 40, 10, "u", "l", 3.5, spread={"ours": [40.0]}), Row("a", 30, 10, "u", "l", 3.5)]
    found = rollout_setup.worse("a", rows, ["small", "large"])
    assert (found.ratio, found.met) == (3.0, False)
    assert found.notes == "large.  small: 40 against 10, 4.00"


def test_medians_of_metrics_are_told_and_those_that_never_came_left_out() -> None:
    answers: list[Job] = [{"metrics": {"rollout/accepted_share": share}} for share in (0.5, 0.9, 0.7)]
    assert rollout_setup.told_metrics(answers, "rollout/accepted_share", "rollout/drafted") == "accepted_share 0.7"


def test_an_environment_of_vllm_that_is_named_but_missing_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COHORT_VLLM_VENV", str(tmp_path))
    with pytest.raises(peers.PeerMissing, match=r"COHORT_VLLM_VENV=.* has no bin/python"):
        peers.vllm_python()


# ---------------------------------------------------------------- jobs
def test_a_measurement_has_the_same_prompts_on_both_sides_and_others_than_the_next() -> None:
    first, again, second = (sampling_jobs.prompts(sampling_jobs.given({}, {"number": n})) for n in (1, 1, 2))
    assert first == again
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_every_completion_has_a_stream_of_its_own_and_its_groups_prompt() -> None:
    job = sampling_jobs.given({"num_prompts": 3, "group_size": 4}, {"number": 7})
    requests = sample_ours.requests_of(job)
    drawn = sampling_jobs.prompts(job)
    assert [request.prompt_ids for request in requests] == [ids for ids in drawn for _ in range(4)]
    assert len({request.stream for request in requests}) == 12
    assert [request.group for request in requests][::4] == ["7-0", "7-1", "7-2"]


@pytest.mark.parametrize(
    "rollout_fields",
    [{"backend": "torch", "drafts": {"kind": "mtp"}}, rollout_vllm._backend({"max_new_tokens": 8}, "vllm_server")],
)
def test_a_job_is_a_valid_run(rollout_fields: dict[str, object]) -> None:
    job = {**sample_ours.JOB, "model": "m", "mtp": {"depth": 2}, "rollout": rollout_fields}
    assert sample_ours.run_config(sampling_jobs.given(job, {})).rollout.backend == rollout_fields["backend"]


def test_the_whole_step_and_the_policys_recipe_are_valid_runs(tmp_path: Path) -> None:
    for small in (False, True):
        setup = rollout_setup.Setup(small=small)
        RunConfig.model_validate(rollout_step.config("bfloat16", setup))
        recipe = rollout_mtp.recipe(tmp_path, tmp_path / "rows.jsonl", setup)
        assert RunConfig.model_validate(recipe).mtp.depth == rollout_mtp.DEPTH


def test_trl_counts_from_the_first_step_after_the_settling_ones() -> None:
    found = rollout_step.counted({"seconds": [9, 9, 1, 2, 4], "tokens": [1, 1, 100, 100, 100], "rewards": [0] * 5})
    assert (found["rate"], found["step_s"], found["length"]) == (50, 2, 100 / 128)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>7+5=12</think>12<eos>", 1.1),
        ("<think>7+5=12</think>13<eos>", 0.1),
        ("12<eos>", 1.0),
        ("</think>12<eos>", 1.0),
    ],
)
def test_trls_reward_is_the_demos(text: str, value: float) -> None:
    assert trl_step.judge(text, "12") == pytest.approx(value)


# ---------------------------------------------------------------- models set by hand
def tiny(vocab_size: int, width: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return model


@torch.inference_mode()
def test_the_end_token_of_an_endless_model_is_never_likely() -> None:
    model = tiny(56, 32, tied=True)
    rollout_models.forbid_end(model)
    logprobs = torch.log_softmax(model(torch.randint(3, 56, (4, 30))).logits, dim=-1)
    assert float(logprobs[..., 2].max()) < -12
    assert float(logprobs[..., 3].min()) > -8


@torch.inference_mode()
def test_a_countdown_goes_down_by_one_and_starts_with_the_lengths_it_was_given() -> None:
    longest = 40
    model = tiny(longest + 2, 128, tied=False)
    wanted = rollout_models.length_logprobs(longest)
    rollout_models.set_countdown(model, wanted)
    ids = torch.tensor([[*range(1, longest), longest + 1]])
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)
    assert logprobs[:-1].argmax(-1).tolist() == list(range(longest - 1))
    assert float(logprobs[:-1].max(-1).values.min()) > -1e-4
    assert torch.allclose(logprobs[-1, :longest], wanted, atol=1e-4)


def test_lengths_have_the_quantiles_of_the_claim() -> None:
    cumulative = rollout_models.length_logprobs(100_000).exp().cumsum(0)
    assert int((cumulative < 0.5).sum()) + 1 == pytest.approx(60, abs=1)
    assert int((cumulative < 0.99).sum()) + 1 == pytest.approx(1000, rel=0.01)


class FakePool(Standing):
    """A process whose completion of stream [0, i] has 3 * i + 1 tokens."""

    def __init__(self) -> None: ...

    def ask(self, **order: object) -> Job:
        streams = order["streams"]
        assert isinstance(streams, list)
        return {"ids": [[3 * index] for _, index in streams]}


def test_streams_are_found_for_the_wanted_lengths_each_used_once() -> None:
    assert rollout_decode.matching_streams(FakePool(), [61, 301, 61]) == [[0, 20], [0, 100], [0, 19]]


# ---------------------------------------------------------------- the text
@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return counting_text.tokenizer()


def test_every_number_is_one_token_of_a_large_vocabulary(bpe: Tokenizer) -> None:
    assert bpe.get_vocab_size() >= 4000
    assert all(len(bpe.encode(f" {n}").ids) == 1 for n in range(counting_text.NUMBERS))


def test_long_completions_never_repeat_themselves_and_have_the_lengths_of_the_claim(
    bpe: Tokenizer,
) -> None:
    for start in counting_text.long_starts(8):
        ids = [*bpe.encode(counting_text.completion(start, random.Random(start))).ids, 0]
        assert rollout_mtp.LENGTHS[0] <= len(ids) <= rollout_mtp.LENGTHS[1]
        assert counting_text.repeated_share(ids) == 0


def test_a_computation_goes_on_from_its_prompt_and_ends_at_0() -> None:
    numbers = [int(word) for word in counting_text.completion(907, random.Random(0)).split()]
    assert counting_text.prompt(907) == "go on: 908 1091"
    assert numbers[0] == 907
    assert numbers[1] % 1000 == 999 - 907
    assert (numbers[-2], numbers[-1] % 1000) == (0, 999)


def test_repeated_grams_are_those_that_occurred_before() -> None:
    assert counting_text.repeated_share([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert counting_text.repeated_share([1, 2], 4) == 0


@pytest.mark.parametrize(
    ("length", "reason", "ids", "fault"),
    [
        (2048, "length", list(range(2048)), "ended by length"),
        (900, "stop", list(range(900)), "after 900 tokens"),
        (1600, "stop", [1, 2] * 800, "repeat earlier ones"),
    ],
)
def test_a_sample_that_is_cut_short_or_repetitive_is_no_measurement(
    length: int, reason: str, ids: list[int], fault: str
) -> None:
    with pytest.raises(RuntimeError, match=fault):
        rollout_mtp.check_text([{"tokens": length, "finish_reasons": [reason], "ids": [ids]}])
