"""Claims mtp_long and mtp_large_batch: our decoder with drafts by the policy's multi-token prediction heads against
itself without. Policy and heads are trained here, together, by the engine's own supervised stage."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks import counting_text
from benchmarks.engine_runs import Fields, cold_start
from benchmarks.peers import bench_home
from benchmarks.processes import Side
from benchmarks.results import Row, Spread
from benchmarks.rollout_setup import Setup, metric_names, ours, rate_row, rates, told_metrics
from benchmarks.standing import Job, take_turns

LAYERS, WIDTH, HEADS, DEPTH = 12, 128, 4, 3
STEPS, ROWS_PER_STEP = 300, 1
LONGEST_REPEATED_SHARE = 0.1
LENGTHS = (1536, 2048)
CONTEXT = 2176
TURNS = 3
"""A large batch has so many turns for each repetition of the others: its two sides are closer to each other than two
calls of one side on a busy host."""
SAMPLING: Job = {"temperature": 1.0, "min_p": 0.05}
"""The policy is trained for minutes: what it thinks a twentieth as likely as its best guess is noise."""


# ---------------------------------------------------------------- the policy
def policy_checkpoint(setup: Setup) -> Path:
    """The trained policy: a checkpoint whose `trainer/mtp/` holds the heads. Made once for each recipe."""
    rows = bench_home() / "models" / f"counting-{made_from()}.jsonl"
    if not rows.exists():
        counting_text.write_rows(rows, 4096)
    return cold_start(0, config=recipe(untrained(), rows, setup), threads=2)


def recipe(model: Path, rows: Path, setup: Setup) -> Fields:
    """One supervised stage with heads."""
    stage = {
        "kind": "sft",
        "data": {"source": "file", "path": str(rows), "answer_column": None},
        "num_steps": setup.size(STEPS, 2),
        "rows_per_step": setup.size(ROWS_PER_STEP, 1),
        "memory": {"max_micro_batch_tokens": 4096},
        "optimizer": {
            "learning_rate": 3e-3, "beta2": 0.98, "warmup_steps": 20, "schedule": "cosine", "final_rate_share": 0.05,
        },
        "checkpoint": {"every_steps": 10_000},
    }  # fmt: skip
    return {
        "name": "counting", "self_test": "off", "model": {"source": "folder", "path": str(model)},
        "mtp": {"depth": DEPTH, "learning_rate": 3e-3}, "needs": {"device": setup.device}, "stages": [stage],
    }  # fmt: skip


def untrained() -> Path:
    """A Llama of 12 layers with the text's tokenizer, freshly initialised."""
    folder = bench_home() / "models" / f"counting-h{WIDTH}x{LAYERS}-{made_from()}"
    if not (folder / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=counting_text.tokenizer(), eos_token="<end>", pad_token="<pad>", model_max_length=CONTEXT
        )
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT,
            initializer_range=WIDTH**-0.5, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        initialise(model, {n: tokenizer.convert_tokens_to_ids(f"Ġ{n}") for n in range(counting_text.NUMBERS)})
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def made_from() -> str:
    """Changes with the text or the untrained model, so that what was made of others is not taken for theirs."""
    sources = [inspect.getsource(part) for part in (counting_text, untrained, initialise)]
    return hashlib.sha256("".join(sources).encode()).hexdigest()[:8]


@torch.no_grad()
def initialise(model: Any, ids: Mapping[int, int]) -> None:
    """Weights from which counting is learned in minutes: a number's embedding is the sum of its digits' vectors, so
    that what is learned of a digit holds for every number with it, and layers begin small beside the embeddings."""
    embedding = model.get_input_embeddings().weight
    embedding.normal_(std=0.2)
    digits = torch.randn(4, 10, embedding.shape[1]) * 0.1
    for number, token in ids.items():
        embedding[token] = sum(digits[place, number // 10**place % 10] for place in range(4))
    for layer in model.model.layers:
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            matrix.mul_((2 * len(model.model.layers)) ** -0.5)


# ---------------------------------------------------------------- sides
def _job(checkpoint: Path, setup: Setup, **fields: Any) -> Job:
    return {"model": str(checkpoint), "mtp": {"depth": DEPTH}, "device": setup.device, **SAMPLING, **fields}


def _with_and_without(job: Job) -> list[Side]:
    drafted = {**job, "rollout": {"backend": "torch", "drafts": {"kind": "mtp"}}}
    return [ours(drafted, "with drafts"), ours({**job, "rollout": {"backend": "torch"}}, "without")]


def _tokenizer(checkpoint: Path) -> Tokenizer:
    found: Tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return found


def _encoded(checkpoint: Path, starts: list[int]) -> list[list[int]]:
    tokenizer = _tokenizer(checkpoint)
    return [tokenizer.encode(counting_text.prompt(start)).ids for start in starts]


# ---------------------------------------------------------------- claims
def mtp_long(setup: Setup) -> list[Row]:
    """Single samples that end by themselves."""
    checkpoint = policy_checkpoint(setup)
    drawn = [[ids] for ids in _encoded(checkpoint, counting_text.long_starts(setup.repetitions + 1))]
    limit = setup.size(CONTEXT - 16, 32)
    job = _job(checkpoint, setup, prompts=drawn, group_size=1, max_new_tokens=limit, ids=True)
    mine, plain = take_turns(_with_and_without(job), setup.repetitions, warm_up={})
    if not setup.small:
        check_text([*mine, *plain])
    seconds = [Spread([answer["seconds"] for answer in answers]).median for answers in (mine, plain)]
    lengths = sorted(answer["tokens"] for answer in mine)
    repeated = fmean(counting_text.repeated_share(answer["ids"][0]) for answer in mine)
    return [
        rate_row(
            "mtp_long", rates(mine), rates(plain),
            "tokens a forward pass, less the drafts' own time; "
            + told_metrics(mine, "rollout/tokens_per_forward", "rollout/draft_length_mean"),
            goal=1.8,
            notes=f"{seconds[1]:.1f} s became {seconds[0]:.1f} s a sample; {len(lengths)} single samples, each ended "
            f"by itself after {lengths[0]:,} to {lengths[-1]:,} tokens; repeated token 4-grams {repeated:.1%}; "
            f"{accepted(mine)}. {_policy_words(checkpoint)}",
        )
    ]  # fmt: skip


def mtp_large_batch(setup: Setup) -> list[Row]:
    """128 rows, where drafting may not pay: the controller must notice and cost next to nothing."""
    checkpoint = policy_checkpoint(setup)
    turns = TURNS * setup.repetitions
    drawn = [_encoded(checkpoint, counting_text.long_starts(8, seed)) for seed in range(turns + 1)]
    sizes = {"group_size": setup.size(16, 2), "max_new_tokens": setup.size(128, 16)}
    job = _job(checkpoint, setup, prompts=drawn, **sizes)
    mine, plain = take_turns(_with_and_without(job), turns, warm_up={})
    rows = 8 * job["group_size"]
    return [
        rate_row(
            "mtp_large_batch", rates(mine), rates(plain),
            f"1: a step without drafts; with {rows} rows matrix products, not calls, take the time, so that a longer "
            "step costs more",
            goal=0.97,
            notes=f"{rows} rows of {job['max_new_tokens']} new tokens; {accepted(mine)}; "
            f"{told_metrics(mine, *metric_names(mine, 'rollout/draft_length_share_'))}. {_policy_words(checkpoint)}",
        )
    ]  # fmt: skip


def accepted(answers: list[Job]) -> str:
    """Acceptance, whole and by depth."""
    names = ["rollout/accepted_share", *metric_names(answers, "rollout/accepted_share_")]
    return told_metrics(answers, *names) or "no drafts"


def _policy_words(checkpoint: Path) -> str:
    return (
        f"Llama of {LAYERS} layers, h{WIDTH}, byte-level BPE of {_tokenizer(checkpoint).get_vocab_size():,} "
        f"entries, {DEPTH} heads; temperature {SAMPLING['temperature']:g}, min-p {SAMPLING['min_p']:g}, float32, one "
        "thread"
    )


def check_text(answers: list[Job]) -> None:
    """Raises RuntimeError when a sample did not end by itself within LENGTHS, or repeats itself."""
    for answer in answers:
        length, reason = answer["tokens"], answer["finish_reasons"][0]
        if reason != "stop" or not LENGTHS[0] <= length <= LENGTHS[1]:
            raise RuntimeError(f"mtp_long: a sample ended by {reason} after {length} tokens; train the policy longer")
        repeated = counting_text.repeated_share(answer["ids"][0])
        if repeated >= LONGEST_REPEATED_SHARE:
            raise RuntimeError(f"mtp_long: {repeated:.0%} of a sample's token 4-grams repeat earlier ones")
