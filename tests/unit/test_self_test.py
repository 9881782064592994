import math
from dataclasses import replace

import pytest
import torch

from grpo_engine.communicator import SingleRank
from grpo_engine.errors import SelfTestFailed
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.self_test.checks import Check, over_ranks, report
from grpo_engine.self_test.tokens import check_chat_template, check_end_tokens, check_special_tokens
from grpo_engine.self_test.training import check_gradient, check_ratio, check_sampler
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.types import TrainRow
from tests.unit.training_fixtures import ALL_TOKENS, learner, ragged_rows, tiny_llama

KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPS = KEEPS.replace("m.content", "m.content.split('</think>')[-1]")
FORGETS = KEEPS.replace("<assistant>{% endif", "<bot>{% endif")


def rows():
    return [TrainRow([1], [2, 3], 1.0, [-0.5, -1.0]), TrainRow([1], [4], -0.5, [-2.0])]


class Linear:
    """A row's gradient is its advantage times `scale(rows of the call)`; scores are what was sampled plus `gap`."""

    def __init__(self, gap=0.0, scale=lambda count: 1.0, ratio=1.0):
        self.gap, self.scale, self.ratio, self.gradient = gap, scale, ratio, torch.zeros(3)

    def logprobs(self, batch):
        return [[value + self.gap for value in row.rollout_logprobs] for row in batch]

    def accumulate(self, batch, denominator, *, rehearsal):
        for row in batch:
            self.gradient += row.advantage * self.scale(len(batch)) * torch.arange(1.0, 4.0) / denominator

    def gradients(self):
        return {"w": self.gradient}

    def discard(self):
        self.gradient = torch.zeros(3)
        return {"policy/ratio_mean": self.ratio, "policy/ratio_max": self.ratio}


def test_a_sound_learner_passes():
    assert check_sampler(Linear(), rows(), "float32").passed
    assert check_ratio(Linear(), rows(), "float32").passed
    assert check_gradient(Linear(), rows(), 3.0, "float32").passed


@pytest.mark.parametrize("gap", [0.01, math.nan])
def test_a_sampler_that_disagrees_fails(gap):
    check = check_sampler(Linear(gap), rows(), "float32")
    assert not check.passed
    assert "0.001" in check.detail


@pytest.mark.parametrize("ratio", [1.01, math.nan])
def test_a_ratio_other_than_one_fails(ratio):
    assert not check_ratio(Linear(ratio=ratio), rows(), "float32").passed


def test_a_gradient_that_depends_on_the_batch_size_fails():
    check = check_gradient(Linear(scale=lambda count: count), rows(), 3.0, "float32")
    assert not check.passed


def test_no_gradient_at_all_fails():
    assert not check_gradient(Linear(scale=lambda count: 0.0), rows(), 3.0, "float32").passed


def test_the_gradient_check_leaves_nothing_behind():
    linear = Linear()
    check_gradient(linear, rows(), 3.0, "float32")
    assert not linear.gradient.any()


class MeanOfTheCall(PolicyObjective):
    """Divides by the rows of a micro-batch, as a local mean does."""

    def __call__(self, logprobs, rows):
        sums = super().__call__(logprobs, rows)
        return replace(sums, loss=sums.loss / len(rows))


@pytest.mark.parametrize("backbone", ["copied", "shared"])
@pytest.mark.parametrize(("objective", "passes"), [(PolicyObjective(0.7), True), (MeanOfTheCall(0.7), False)])
def test_the_policys_gradient_is_judged_while_the_critic_warms_up(backbone, objective, passes):
    value = {"backbone": backbone, "warmup_steps": 2}
    trainer = learner(tiny_llama(), objective, memory={"max_micro_batch_tokens": ALL_TOKENS}, value=value)
    assert check_gradient(trainer, ragged_rows(4), 20.0, "float32").passed == passes
    assert check_ratio(trainer, ragged_rows(4), "float32").passed
    assert trainer.gradients() == {}


def test_end_and_special_tokens_of_the_character_tokenizer_are_there():
    tokenizer = character_tokenizer(64)
    assert check_end_tokens(tokenizer, {tokenizer.eos_token_id}, len(tokenizer)).passed
    assert check_special_tokens(tokenizer, len(tokenizer)).passed
    assert check_chat_template(tokenizer) is None


def test_an_end_token_that_the_model_cannot_sample_fails():
    tokenizer = character_tokenizer(64)
    assert not check_end_tokens(tokenizer, {tokenizer.eos_token_id, 999}, len(tokenizer)).passed
    assert not check_end_tokens(tokenizer, {3}, len(tokenizer)).passed
    assert not check_special_tokens(tokenizer, 1).passed


@pytest.mark.parametrize(("template", "passes"), [(KEEPS, True), (STRIPS, False), (FORGETS, False)])
def test_a_template_must_only_add_text(template, passes):
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = template
    check = check_chat_template(tokenizer)
    assert check is not None
    assert (check.passed, check.fatal) == (passes, False)


def test_a_template_that_raises_fails_with_its_words():
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = "{{ raise_exception('no answers here') }}"
    check = check_chat_template(tokenizer)
    assert check is not None
    assert "no answers here" in check.detail


def test_the_worst_rank_is_reported():
    class Two(SingleRank):
        def gather(self, value):
            return [value, [Check("ratio", False, "1.3")]]

    assert over_ranks([Check("ratio", True, "1")], Two()) == [Check("ratio", False, "rank 1: 1.3")]


def test_only_fatal_failures_stop_and_only_when_asked():
    told, warned = [], []
    checks = [Check("a", True, "fine"), Check("b", False, "odd", fatal=False), Check("c", False, "wrong")]
    report(checks, told.append, warned.append, stop=False)
    assert told == checks
    assert warned == ["self-test b: odd", "self-test c: wrong"]
    with pytest.raises(SelfTestFailed, match="c: wrong"):
        report(checks, told.append, warned.append, stop=True)
    report(checks[:2], told.append, warned.append, stop=True)
