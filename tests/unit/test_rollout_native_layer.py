"""A layer's small steps in C against the same by torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_engine.rollout.lean import ByTorch
from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.native.layer import InC

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


@pytest.fixture
def steps() -> InC:
    found = InC.for_states(torch.zeros(1))
    assert found is not None
    return found


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 15, 32, 100])
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_the_sum_and_its_norm(steps: InC, width: int, has_branch: bool, epsilon: float) -> None:
    hidden, weight = normal(3, 2, width), normal(width) + 2
    branch = normal(3, 2, width) * 2 if has_branch else None
    expected = hidden.double() if branch is None else hidden.double() + branch.double()
    scale = (expected.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    before = hidden.clone()
    total, normed = steps.added_and_normed(hidden, branch, weight, epsilon)
    torch.testing.assert_close(total.double(), expected, **CLOSE)
    torch.testing.assert_close(normed.double(), expected * scale * weight.double(), **CLOSE)
    assert torch.equal(hidden, before)  # earlier layers' sum is still somebody's


@pytest.mark.parametrize("width", [2, 20, 32, 64])
def test_heads_are_turned(steps: InC, width: int) -> None:
    query, key = normal(3, 2, 4, width), normal(3, 2, 1, width)
    cos, sin = normal(3, 2, width), normal(3, 2, width).flip(0) - 1
    expected = ByTorch().rotated(*(part.double() for part in (query, key, cos, sin)))
    for found, wanted in zip(steps.rotated(query, key, cos, sin), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, **CLOSE)


def test_a_rotation_of_a_part_of_each_head_is_refused(steps: InC) -> None:
    with pytest.raises(ValueError, match="width 20 are turned by 10"):
        steps.rotated(normal(3, 2, 4, 20), normal(3, 2, 1, 20), normal(3, 2, 10), normal(3, 2, 10))


@pytest.mark.parametrize("count", [1, 16, 17, 100])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_gates(steps: InC, count: int, size: float) -> None:
    gate, up = size * normal(count), normal(count + 1)[1:].clone()
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(steps.gated(gate, up).double(), expected, **CLOSE)


def test_what_is_not_finite_is_not_hidden(steps: InC) -> None:
    poisoned = normal(2, 20)
    poisoned[1, 3] = float("nan")
    _, normed = steps.added_and_normed(poisoned, None, torch.ones(20), 1e-6)
    assert normed[1].isnan().all()
    assert normed[0].isfinite().all()
    gates = steps.gated(poisoned.clone(), torch.ones(2, 20))
    assert gates.isnan().nonzero().tolist() == [[1, 3]]
    large = steps.gated(torch.tensor([1e4, -1e4, float("inf")]), torch.ones(3))
    assert large.tolist() == [1e4, pytest.approx(0, abs=1e-30), float("inf")]


@pytest.mark.parametrize("spoilt", [normal(4, 20).double(), normal(20, 4).t()])
def test_other_types_and_strides_never_reach_the_loops(steps: InC, spoilt: Tensor) -> None:
    plain = normal(4, 20)
    with pytest.raises(TypeError, match="contiguous float32"):
        steps.gated(plain, spoilt)
    with pytest.raises(TypeError, match="contiguous float32"):
        steps.added_and_normed(plain, spoilt, torch.ones(20), 1e-6)
    with pytest.raises(TypeError, match="contiguous float32"):
        steps.added_and_normed(plain, None, torch.ones(20).double(), 1e-6)
    with pytest.raises(TypeError, match="contiguous float32"):
        steps.rotated(normal(2, 2, 1, 20), normal(2, 2, 1, 20), spoilt.view_as(spoilt), plain)


def test_other_types_and_autocast_are_left_to_torch() -> None:
    assert InC.for_states(torch.zeros(1, dtype=torch.bfloat16)) is None
    assert InC.for_states(torch.zeros(1, dtype=torch.float64)) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert InC.for_states(torch.zeros(1)) is None
