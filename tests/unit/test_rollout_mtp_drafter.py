from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import MTPDrafts
from grpo_engine.errors import InvalidConfig
from grpo_engine.model.mtp import CompletionSlots, MTPHeads, embedded, head_logits
from grpo_engine.model.truncation import kept_mask
from grpo_engine.rollout.drafting import Drafter, Drafts
from grpo_engine.rollout.mtp_drafter import CATCH_UP, WINDOW, MTPDrafter
from grpo_engine.rollout.speculation import make_speculator
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import SampleRequest
from tests.unit.tiny_models import TOKENIZER, tiny_model
from tests.unit.training_fixtures import VOCABULARY, tiny_llama

CPU = torch.device("cpu")
GREEDY = SamplingConfig(temperature=0)
TRUNCATED = SamplingConfig(temperature=0.7, top_k=6, top_p=0.9)
WIDTH = 16


@dataclass
class Row:
    """What a policy would have given: tokens, and the hidden state that predicted each."""

    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class Scene:
    """A drafter and what it was told, of rows whose tokens and hidden states are random."""

    def __init__(self, depth: int = 2, max_tokens: int = 5, **options: object) -> None:
        self.model = tiny_llama(**options)
        self.heads = MTPHeads(self.model, depth, seed=1)
        self.drafter = MTPDrafter(self.heads, self.model, max_tokens)
        self.rows: list[Row] = []
        self._draw = torch.Generator().manual_seed(0)

    def admit(self, count: int) -> None:
        tokens_BQ, hidden_BQH = self._invented(count, 1)
        self.drafter.admit([[1, 2]] * count, tokens_BQ[:, 0], hidden_BQH[:, 0])
        self.rows += [Row([int(t)], [h[0]]) for t, h in zip(tokens_BQ, hidden_BQH, strict=True)]

    def confirm(self, *counts: int) -> None:
        """Each row gains so many tokens, of a step of up to the most of them and two more."""
        self._confirm(counts, min(max(counts) + 2, self.drafter.max_tokens + 1))

    def plain(self, *counts: int) -> None:
        """A step without drafts: each row gains a token, or none where it has ended."""
        self._confirm(counts, 1)

    def _confirm(self, counts: Sequence[int], num_tokens: int) -> None:
        tokens_BQ, hidden_BQH = self._invented(len(counts), num_tokens)
        self.drafter.confirm(tokens_BQ, torch.tensor(counts), hidden_BQH)
        for row, count, tokens, hidden in zip(self.rows, counts, tokens_BQ, hidden_BQH, strict=True):
            row.tokens += tokens[:count].tolist()
            row.hidden += list(hidden[:count])

    def select(self, *rows: int) -> None:
        self.drafter.select(torch.tensor(rows, dtype=torch.long))
        self.rows = [self.rows[index] for index in rows]

    def propose(self, count: int, sampling: SamplingConfig = GREEDY) -> Drafts:
        if sampling.temperature == 0:
            return self.drafter.propose(count, sampling, None)
        numbers_BK = torch.rand(len(self.rows), count, dtype=torch.float64, generator=self._draw)
        return self.drafter.propose(count, sampling, numbers_BK)

    def _invented(self, *shape: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, shape, generator=self._draw)
        return tokens, torch.randn(*shape, WIDTH, dtype=torch.float64, generator=self._draw)

    # ------------------------------------------------------------ what training computes
    def logits(self, row: Row, drafted: Sequence[int], last: int | None = None) -> list[Tensor]:
        """[V] of each depth at the row's newest slot, by the heads' own forward over the row with its drafts; `last`
        slots of it only."""
        cut = 0 if last is None else max(0, len(row.tokens) - last)
        tokens = torch.tensor([*row.tokens[cut:], *drafted])
        hidden_NH = torch.stack([*row.hidden[cut:], *[torch.zeros(WIDTH).double()] * len(drafted)])
        slots = CompletionSlots.of([len(tokens)], CPU)
        features = self.heads(hidden_NH, embedded(self.model, tokens), slots)
        newest = len(row.tokens) - cut - 1
        return [head_logits(self.model, each[newest]) for each in features]

    def check(self, drafts: Drafts, *lasts: int) -> None:
        """Greedy drafts are the likeliest tokens of training's own forward, depth by depth, over all slots of a row or
        its last few."""
        for index, (row, drafted) in enumerate(zip(self.rows, drafts.tokens_BK.tolist(), strict=True)):
            depth, last = min(len(drafted), self.heads.depth), lasts[index] if lasts else None
            expected = [int(logits.argmax()) for logits in self.logits(row, drafted[:depth], last)[:depth]]
            assert drafted[:depth] == expected


def test_it_is_a_drafter() -> None:
    drafter: Drafter = Scene().drafter
    assert (drafter.samples, drafter.max_tokens) == (True, 5)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pairs", [1, 2])
def test_drafts_are_those_of_the_trained_forward_over_ragged_steps(depth: int, pairs: int) -> None:
    scene = Scene(depth, num_key_value_heads=pairs)
    scene.admit(3)
    scene.check(scene.propose(depth))
    for counts in ((1, 3, 2), (4, 1, 1), (1, 1, 1), (0, 5, 2), (2, 2, 6)):
        scene.confirm(*counts)
        drafts = scene.propose(depth)
        assert drafts.logprobs_BKV is None
        assert drafts.lengths_B.tolist() == [depth] * 3
        scene.check(drafts)


def test_steps_without_drafts_and_shorter_ones_are_caught_up() -> None:
    scene = Scene(3)
    scene.admit(2)
    for lengths in ((0, 0, 0, 3), (1, 1, 3), (0, 2, 0, 1, 2, 3), (2, 2, 2)):
        for length in lengths:
            scene.confirm(1, 2)
            if length:
                scene.check(scene.propose(length))


@pytest.mark.parametrize("num_steps", [1, 2, CATCH_UP - 1, CATCH_UP, CATCH_UP + 1, 3 * CATCH_UP + 5])
def test_plain_steps_are_remembered_however_many(num_steps: int) -> None:
    scene = Scene(2)
    scene.admit(3)
    for _ in range(num_steps):
        scene.plain(1, 1, 1)
        assert len(scene.drafter._unwritten) <= CATCH_UP  # as many as lie side by side
    kept = 1 + num_steps if num_steps < CATCH_UP else CATCH_UP
    scene.check(scene.propose(2), kept, kept, kept)
    scene.confirm(2, 1, 3)
    scene.plain(1, 0, 1)
    scene.plain(1, 0, 1)
    scene.select(0, 2)
    scene.plain(1, 1)
    scene.confirm(2, 1)
    scene.check(scene.propose(2), kept + 7, kept + 7)


def test_rows_come_and_go() -> None:
    scene = Scene(2)
    scene.admit(2)
    scene.confirm(3, 1)
    scene.propose(2)
    scene.admit(2)
    scene.check(scene.propose(2))
    scene.confirm(1, 2, 3, 1)
    scene.select(1, 3)
    scene.check(scene.propose(2))
    scene.confirm(2, 1)
    scene.admit(1)
    scene.confirm(1, 1, 4)
    scene.check(scene.propose(2))
    scene.select()
    scene.admit(1)
    scene.check(scene.propose(2))


def test_a_long_absence_costs_the_older_slots_and_nothing_else() -> None:
    scene = Scene(2)
    scene.admit(2)
    for _ in range(5):
        scene.confirm(2, 1)
    scene.propose(2)
    for _ in range(CATCH_UP + 9):
        scene.confirm(1, 1)
    scene.check(scene.propose(2), CATCH_UP, CATCH_UP)
    scene.confirm(3, 1)
    scene.check(scene.propose(2), CATCH_UP + 3, CATCH_UP + 1)


def test_a_block_sees_the_last_slots_of_a_long_row_and_keeps_no_more() -> None:
    scene = Scene(1)
    scene.admit(2)
    for step in range(3 * WINDOW // 5):
        scene.confirm(6, 1 + step % 3)
        drafts = scene.propose(1 + step % 5)
    scene.check(drafts, WINDOW, WINDOW)
    assert len(scene.rows[0].tokens) > 3 * WINDOW > len(scene.rows[1].tokens) > WINDOW


def test_a_new_row_beside_one_that_was_long_away_is_as_if_alone() -> None:
    scene = Scene(2)
    scene.admit(1)
    for _ in range(CATCH_UP + 5):
        scene.confirm(1)
    scene.admit(1)
    scene.check(scene.propose(2), CATCH_UP, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_longer_than_the_heads_go_on_and_leave_the_cache_right(depth: int) -> None:
    scene = Scene(depth)
    scene.admit(2)
    for counts in ((1, 2), (6, 3), (1, 1)):
        scene.confirm(*counts)
        drafts = scene.propose(5)
        assert drafts.tokens_BK.shape == (2, 5)
        assert ((drafts.tokens_BK >= 0) & (drafts.tokens_BK < VOCABULARY)).all()
        scene.check(drafts)
    scene.confirm(2, 2)
    scene.check(scene.propose(depth))


@pytest.mark.parametrize("filters", [{"top_k": 6, "top_p": 0.9}, {"min_p": 0.3}, {"top_k": 3}, {"top_p": 0.5}])
def test_sampled_drafts_tell_the_distribution_they_came_from(filters: dict[str, Any]) -> None:
    sampling = SamplingConfig(temperature=0.7, **filters)
    scene = Scene(2)
    scene.admit(2)
    scene.confirm(1, 3)
    drafts = scene.propose(2, sampling)
    assert drafts.logprobs_BKV is not None
    for row, drafted, found_KV in zip(scene.rows, drafts.tokens_BK.tolist(), drafts.logprobs_BKV, strict=True):
        for place, logits_V in enumerate(scene.logits(row, drafted)):
            full_V = (logits_V / 0.7).softmax(-1)
            kept_V = kept_mask((logits_V / 0.7)[None], sampling.top_k, sampling.top_p, sampling.min_p)[0]
            assert kept_V[drafted[place]]
            assert torch.equal(found_KV[place].isfinite(), kept_V)
            expected_V = torch.where(kept_V, full_V, torch.zeros_like(full_V))
            torch.testing.assert_close(found_KV[place].exp().double(), expected_V / expected_V.sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_number_decides_which_token_is_drafted_in_its_place(place: int) -> None:
    drafter, count = Scene(2).drafter, 400
    drafter.admit([[1]] * count, torch.full((count,), 3), torch.ones(count, WIDTH, dtype=torch.float64))
    numbers_BK = torch.full((count, 3), 0.4, dtype=torch.float64)
    numbers_BK[:, place] = torch.arange(count, dtype=torch.float64) / count
    drafts = drafter.propose(3, SamplingConfig(temperature=1.5), numbers_BK)
    assert all(len(set(drafts.tokens_BK[:, before].tolist())) == 1 for before in range(place))
    share_V = torch.bincount(drafts.tokens_BK[:, place], minlength=VOCABULARY) / count
    assert drafts.logprobs_BKV is not None
    torch.testing.assert_close(share_V, drafts.logprobs_BKV[0, place].exp(), rtol=0, atol=0.006)


def test_a_model_without_hidden_states_is_refused_in_words() -> None:
    with pytest.raises(InvalidConfig, match="LlamaForCausalLM does more to its logits"):
        Scene().drafter.admit([[1]], torch.tensor([3]), torch.empty(0))


def test_drafting_leaves_no_graph() -> None:
    scene = Scene(1)
    scene.admit(1)
    drafts = scene.propose(2, TRUNCATED)
    assert drafts.logprobs_BKV is not None
    assert not drafts.logprobs_BKV.requires_grad


# ---------------------------------------------------------------- in the decoder
def test_decoding_with_heads_samples_what_is_asked_for_and_greedy_is_as_without() -> None:
    model = tiny_model("llama").eval()
    heads = MTPHeads(model, 2, seed=0)
    ends = torch.tensor([2])
    requests = [SampleRequest([5 + index, 7], (1, index), str(index)) for index in range(3)]
    found = []
    for drafts in (None, MTPDrafts(fixed_tokens=3)):
        speculator = drafts and make_speculator(drafts, ends, MTPDrafter(heads, model, 5))
        sampler = TorchSampler(model, TOKENIZER, [2], 64, speculator=speculator)
        found.append(sampler.sample(requests, SamplingConfig(temperature=0, max_new_tokens=30)))
        sampled = sampler.sample(requests, SamplingConfig(temperature=0.7, top_k=4, max_new_tokens=30))
        assert all(t in kept for each in sampled for t, kept in zip(each.token_ids, each.kept_ids or [], strict=True))
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]
    assert sampler.take_metrics()["rollout/drafted_tokens"] > 0
