from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grpo_engine.model.packing import KeptIds
from grpo_engine.model.vocabulary import Scores, Scoring, score_hidden, score_logits

TOKENS, WIDTH, VOCABULARY = 7, 5, 11
SIZES = [3, 1, 4, 2, 11, 2, 3]


def problem(seed: int = 0, *, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64)
    features = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return head, features, torch.randint(VOCABULARY, (TOKENS,))


def kept_with(target: Tensor) -> KeptIds:
    torch.manual_seed(1)
    sets = []
    for token, size in zip(target.tolist(), SIZES, strict=True):
        others = [index for index in torch.randperm(VOCABULARY).tolist() if index != token]
        sets.append(sorted([token, *others[: size - 1]]))
    return KeptIds(torch.tensor([index for ids in sets for index in ids]), SIZES)


def naive(head: nn.Module, features: Tensor, target: Tensor, kept: KeptIds | None, temperature: float) -> Scores:
    """Plain formulas on all logits, a token at a time."""
    logits = head(features) / temperature
    columns: list[list[Tensor]] = [[], [], [], []]
    sets = None if kept is None else kept.ids_M.split(kept.sizes)
    for t, token in enumerate(target.tolist()):
        log_p = logits[t].log_softmax(0)
        full = log_p[token]
        policy = full if sets is None else full - log_p[sets[t]].logsumexp(0)
        values = (policy, full, -(log_p.exp() * log_p).sum(), log_p.argmax() == token)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return Scores(*map(torch.stack, columns))


@pytest.mark.parametrize("chunk_rows", [2, 3, 100])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_plain_formulas(chunk_rows: int, kept: bool, bias: bool) -> None:
    head, features, target = problem(bias=bias)
    sets = kept_with(target) if kept else None
    mix = torch.randn(3, TOKENS, dtype=torch.float64)
    results = []
    for scores in (
        score_hidden(head, features, target, sets, Scoring(0.7, chunk_rows, True)),
        naive(head, features, target, sets, 0.7),
    ):
        loss = (mix[0] * scores.policy * scores.full + mix[1] * scores.entropy + mix[2] * scores.policy).sum()
        results.append([*scores, *torch.autograd.grad(loss, [features, *head.parameters()])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [3, 100])
@pytest.mark.parametrize("kept", [False, True])
def test_gradcheck_of_every_output(chunk_rows: int, kept: bool) -> None:
    head, features, target = problem(bias=True)
    sets = kept_with(target) if kept else None

    def outputs(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        del head.weight, head.bias
        head.weight, head.bias = weight, bias
        return score_hidden(head, features, target, sets, Scoring(0.7, chunk_rows, True))[:3]

    inputs = (features, head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_())
    assert torch.autograd.gradcheck(outputs, inputs)


def test_entropy_carries_a_gradient_only_when_asked() -> None:
    head, features, target = problem()
    assert not score_hidden(head, features, target, None, Scoring(1.0, 3)).entropy.requires_grad
    assert score_hidden(head, features, target, None, Scoring(1.0, 3, True)).entropy.requires_grad
    assert not score_logits(head(features), target, None, Scoring(1.0, 3)).entropy.requires_grad


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_a_second_backward_gives_the_same_gradient(chunk_rows: int) -> None:
    head, features, target = problem()
    total = score_hidden(head, features, target, kept_with(target), Scoring(1.0, chunk_rows)).policy.sum()
    first = torch.autograd.grad(total, features, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(total, features)[0], first)


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_a_head_that_is_no_plain_linear_layer_is_called_itself(chunk_rows: int) -> None:
    head, features, target = problem()
    doubled = nn.Sequential(head, nn.Softplus())
    for ours, expected in zip(
        score_hidden(doubled, features, target, None, Scoring(0.7, chunk_rows, True)),
        naive(doubled, features, target, None, 0.7),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_the_features_do() -> None:
    head, features, target = problem()
    head.requires_grad_(False)
    score_hidden(head, features, target, None, Scoring(1.0, 3)).policy.sum().backward()
    assert head.weight.grad is None
    assert features.grad is not None


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_impossible_tokens_leave_entropy_and_gradient_finite(temperature: float) -> None:
    head, features, target = problem(bias=True)
    with torch.no_grad():
        head.bias[(target[0] + 1) % VOCABULARY] = -torch.inf
    target = target[:1].expand(TOKENS)
    scores = score_hidden(head, features, target, None, Scoring(temperature, 3, True))
    (scores.policy + scores.entropy).sum().backward()
    assert scores.entropy.isfinite().all()
    assert features.grad is not None
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_bfloat16_logits_float32_softmax_and_a_float32_gradient_of_the_master(chunk_rows: int) -> None:
    head, features, target = problem()
    head, features = head.float(), features.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_hidden(head, features, target, None, Scoring(1.0, chunk_rows))
        logits = head(features).float()
    assert scores.policy.dtype == torch.float32
    torch.testing.assert_close(scores.full, logits.log_softmax(1).gather(1, target[:, None])[:, 0])
    scores.full.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == features.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_equally_likely_tokens_are_all_correct() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [3.0, 1.0, 2.0]])
    assert score_logits(logits, torch.tensor([2, 1]), None, Scoring(1.0, 9)).correct.tolist() == [True, False]


def peak_kilobytes(work: Callable[[], None]) -> int:
    """How far the process's resident memory rises while `work` runs."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest value so far
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_peak_memory_is_a_fraction_of_that_of_full_logits() -> None:
    torch.manual_seed(0)
    head, features = nn.Linear(16, 4096, bias=False), torch.randn(2048, 16, requires_grad=True)
    target = torch.randint(4096, (2048,))

    def ours() -> None:
        scores = score_hidden(head, features, target, None, Scoring(1.0, 64, True))
        (scores.policy.sum() + scores.entropy.sum()).backward()

    def full() -> None:
        log_p = head(features).log_softmax(1)
        (log_p.gather(1, target[:, None]).sum() - (log_p.exp() * log_p).sum()).backward()

    assert peak_kilobytes(ours) <= 0.25 * peak_kilobytes(full)
