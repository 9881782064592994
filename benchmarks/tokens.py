"""Claims packing and vocab_memory: counts and bytes rather than times."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.batches import skewed
from benchmarks.processes import in_process
from benchmarks.results import Row
from benchmarks.trl_update import memory
from grpo_engine.config_training import MemoryConfig
from grpo_engine.model.logprobs import CHUNK_ELEMENTS
from grpo_engine.model.packing import collate, micro_batches
from grpo_engine.model.vocabulary import Scoring, score_hidden
from grpo_engine.types import TrainRow

VOCABULARY, TOKENS, WIDTH = 49_152, 4_096, 576


def packing(seeds: int = 5) -> list[Row]:
    """Useful share of the positions that the worst layer computes: attention, whose buckets pad."""
    budget = MemoryConfig().max_micro_batch_tokens
    shares = [
        useful_share([TrainRow(r.prompt_ids, r.completion_ids) for r in skewed(s).rows], budget) for s in range(seeds)
    ]
    attention = sorted(share for share, _ in shares)[len(shares) // 2]
    row = Row(
        "packing",
        attention,
        None,
        "useful / computed",
        "1: every position real. Dense layers reach it: they compute no padding, and a shared prompt once",
        goal=0.91,
        spread={"ours": [share for share, _ in shares]},
        notes=f"median of {seeds} shuffles of the skewed batch, micro-batches of {budget:,} tokens; dense layers "
        f"compute {shares[0][1]:.2f} positions for each real token of a row",
    )
    return [row]


def useful_share(rows: list[TrainRow], max_tokens: int) -> tuple[float, float]:
    """Of attention's slots, the share that holds a token; and positions of the dense layers for each token of a row."""
    slots = dense = real = 0
    for indices in micro_batches(rows, max_tokens):
        some = [rows[index] for index in indices]
        layout = collate(some, device=torch.device("cpu"), packed=True).layout
        assert layout is not None
        slots += sum(height * width for height, width in layout.shapes)
        dense += len(layout.slot_N)
        real += sum(len(row.prompt_ids) + len(row.completion_ids) - 1 for row in some)
    return real / slots, dense / real


# ---------------------------------------------------------------- vocabulary
def vocab_memory(rounds: int) -> list[Row]:
    peaks: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        for name, full in (("ours", False), ("peer", True)):
            peaks[name].append(float(in_process("benchmarks.tokens:peak_bytes", {"full_logits": full})))
    mine, theirs = (sorted(peaks[name])[len(peaks[name]) // 2] for name in ("ours", "peer"))
    logits, weight = 4 * TOKENS * VOCABULARY, 4 * VOCABULARY * WIDTH
    row = Row(
        "vocab_memory",
        mine,
        theirs,
        "peak bytes above inputs",
        f"the head's gradient, {weight / 1e6:.0f} MB, is needed by both; full logits are {logits / 1e6:.0f} MB a copy, "
        f"a chunk of ours {4 * CHUNK_ELEMENTS / 1e6:.0f} MB",
        goal=0.25,
        better="less",
        spread=peaks,
        notes=f"{VOCABULARY:,} tokens of vocabulary, {TOKENS:,} positions, h {WIDTH}, float32; log-probability and "
        "entropy, forward and backward; resident high-water of a process less what it held before",
    )
    return [row]


def peak_bytes(full_logits: bool) -> int:
    """In a process of its own: resident bytes that forward and backward add at their highest."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    features = torch.randn(TOKENS, WIDTH, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS,))
    warm = torch.randn(64, WIDTH, requires_grad=True)
    _score(head, warm, target[:64], full_logits).sum().backward()  # type: ignore[no-untyped-call]  # buffers of the library
    head.weight.grad = None
    before = _reset_peak()
    _score(head, features, target, full_logits).sum().backward()  # type: ignore[no-untyped-call]
    return memory()["peak"] - before


def _score(head: nn.Linear, features: torch.Tensor, target: torch.Tensor, full_logits: bool) -> torch.Tensor:
    if not full_logits:
        how = Scoring(1.0, max(1, CHUNK_ELEMENTS // VOCABULARY))
        return score_hidden(head, features, target, None, how).policy
    logits: torch.Tensor = head(features)
    logprobs = logits.float().log_softmax(-1)
    del logits
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, target[:, None])[:, 0]
    return chosen + 0 * entropy


def _reset_peak() -> int:
    """Set the kernel's high-water mark back to what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()["resident"]
