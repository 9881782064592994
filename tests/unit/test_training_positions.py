from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from grpo_engine.config_training import AuxiliaryConfig, GSPOLoss, KLConfig
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.packing import collate
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.training.positions import EDGES, parameter_gradient_norms, position_stats
from grpo_engine.types import TrainRow, global_denominator
from tests.unit.training_fixtures import POLICY, VOCABULARY, gradients, learner, tiny_llama, update

GSPO = replace(POLICY, loss=GSPOLoss(clip_low=0.5, clip_high=0.5))
NAMES = ["gradient/position/0-64", "gradient/position/64-128"]


def long_rows() -> list[TrainRow]:
    """Completions of 10 to 100 tokens, some of them masked."""
    draw = random.Random(1)
    rows = []
    for length in (10, 70, 100):
        tokens = [draw.randrange(2, VOCABULARY) for _ in range(length)]
        noise = [draw.gauss(-2.5, 0.4) for _ in tokens]
        mask = [draw.random() < 0.7 for _ in tokens]
        rows.append(TrainRow([4, 5], tokens, draw.gauss(0, 1), noise, None, noise, loss_mask=mask))
    return rows


def expected(rows: list[TrainRow]) -> dict[str, float]:
    """RMS over a bucket's trained tokens of the loss sum's gradient in the hidden states, all rows in one batch."""
    forward = LogprobForward(tiny_llama(max_position_embeddings=128))
    logprobs = forward(collate(rows, device=forward.device, packed=False), POLICY.temperature)
    assert logprobs.features is not None
    (gradient,) = torch.autograd.grad(POLICY(logprobs, rows).loss, logprobs.features)
    positions = [t for row in rows for t in range(len(row.completion_ids))]
    trained = [flag for row in rows for flag in row.loss_mask or [True] * len(row.completion_ids)]
    squares = gradient.square().sum(1).tolist()
    means = {}
    for name, low in zip(NAMES, (0, 64), strict=True):
        inside = [low <= t < low + 64 for t in positions]
        count = sum(a and b for a, b in zip(inside, trained, strict=True))
        means[name] = math.sqrt(sum(s for s, i in zip(squares, inside, strict=True) if i) / count)
    return means


@pytest.mark.parametrize("limit", [1, 130, 1000])
def test_gradients_by_position_are_those_of_the_hidden_states(limit: int) -> None:
    rows = long_rows()
    trainer = learner(tiny_llama(max_position_embeddings=128), memory={"max_micro_batch_tokens": limit})
    stats = update(trainer, rows).stats
    found = {name: value for name, value in stats.items() if name.startswith("gradient/position/")}
    assert found == pytest.approx(expected(rows), rel=1e-6)


def test_the_size_of_the_batch_does_not_scale_them() -> None:
    rows = long_rows()
    once, twice = (
        update(learner(tiny_llama(max_position_embeddings=128)), part).stats for part in (rows, [*rows, *rows])
    )
    assert [once[name] for name in NAMES] == pytest.approx([twice[name] for name in NAMES], rel=1e-6)


def test_buckets_without_tokens_are_left_out_and_the_last_one_is_open() -> None:
    counts = [0.0] * len(EDGES)
    counts[1], counts[-1] = 4.0, 1.0
    squares = [0.0] * len(EDGES)
    squares[1], squares[-1] = 16.0, 9.0
    assert position_stats(squares, counts) == {"gradient/position/64-128": 2.0, "gradient/position/1048576-inf": 3.0}


@pytest.mark.parametrize("objective", [POLICY, GSPO, replace(POLICY, auxiliary=AuxiliaryConfig(weight=1.0))])
def test_the_parts_of_the_parameters_gradient_are_those_of_their_tokens(objective: PolicyObjective) -> None:
    rows, model = long_rows(), tiny_llama(max_position_embeddings=128)
    forward = LogprobForward(model)
    denominator = global_denominator(rows)
    learner(model, objective).accumulate(rows, denominator)
    whole = math.sqrt(sum(float(g.square().sum()) for g in gradients(model).values()))
    model.zero_grad()
    found = parameter_gradient_norms(forward, objective, rows, denominator, max_tokens=90, edges=(0, 1000))
    assert found == {"0-1000": pytest.approx(whole, rel=1e-6)}
    parts = parameter_gradient_norms(forward, objective, rows, denominator, max_tokens=90)
    assert list(parts) == ["0-64", "64-128"]
    assert all(norm > 0 for norm in parts.values())
    assert sum(parts.values()) >= whole * (1 - 1e-6)
    assert gradients(model) == {}


def test_a_bucket_that_alone_is_trained_has_the_whole_gradient() -> None:
    late = [
        replace(
            row,
            loss_mask=[t >= 64 and bool(row.loss_mask and row.loss_mask[t]) for t in range(len(row.completion_ids))],
        )
        for row in long_rows()
    ]
    model = tiny_llama(max_position_embeddings=128)
    parts = parameter_gradient_norms(LogprobForward(model), POLICY, late, global_denominator(late), max_tokens=500)
    assert parts["0-64"] == 0
    assert parts["64-128"] > 0


def test_an_auxiliary_loss_adds_gradient_to_late_tokens_that_the_policy_loss_left_without() -> None:
    rows = [replace(row, advantage=1e-6) for row in long_rows()]
    plain = replace(POLICY, kl=KLConfig(weight=0.0, track=False))
    norms = {}
    for name, objective in (("without", plain), ("with", replace(plain, auxiliary=AuxiliaryConfig(weight=0.1)))):
        model = tiny_llama(max_position_embeddings=128)
        norms[name] = parameter_gradient_norms(LogprobForward(model), objective, rows, 1.0, max_tokens=500)["64-128"]
    assert norms["with"] > 1000 * norms["without"]
