"""Which checkpoint is good, what is rolled back to it, and what becomes of numbers that are not finite."""

from types import SimpleNamespace

import pytest

from grpo_engine.config import SamplingConfig
from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.errors import NonFinite
from grpo_engine.evaluation.held_out import HeldOutEvaluation
from grpo_engine.stages.recovery import guard, rescue
from grpo_engine.stages.rl import run_rl
from grpo_engine.types import Completion, Prompt, StepResult
from tests.unit.stage_fakes import CountingLearner, batch_of, context_of, parts_of, rl_stage

BROKEN = NonFinite("log-probabilities are NaN")


def step(norm=0.5, kl=0.01, applied=True):
    return StepResult(applied, norm, 1e-4, {"loss": 0.1, "policy/kl": kl})


def guarded(tmp_path, *results, **changes):
    """A stage that saves a checkpoint before each of the steps; the last good one's step."""
    stage = rl_stage(**({"guards": {"spike_window": 5}} | changes))
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    for result in results:
        context.checkpoint(good=not parts.guards.alarmed)
        context.progress.step += 1
        guard(context, stage, parts, result)
    return int(context.last_good.name[-6:])


def test_a_checkpoint_is_good_once_training_went_on_from_it(tmp_path):
    assert guarded(tmp_path, step(), step(), step()) == 2


def test_the_checkpoint_that_an_explosion_was_saved_in_is_not_good(tmp_path):
    assert guarded(tmp_path, step(), step(), step(kl=9)) == 1
    assert guarded(tmp_path, step(), step(), step(kl=9), step(kl=9), step(kl=9)) == 1


def test_a_skipped_step_and_the_first_spike_prove_nothing(tmp_path):
    assert guarded(tmp_path, step(), step(), step(applied=False)) == 1
    calm = [step()] * 6
    assert guarded(tmp_path, *calm, step(norm=50), step(norm=50)) == 5
    assert guarded(tmp_path, *calm, step(norm=50), step()) == 7


def test_without_guards_the_newest_checkpoint_is_the_good_one(tmp_path):
    stage = rl_stage(guards={"action": "off"})
    context = context_of(stage, tmp_path)
    for context.progress.step in (1, 2):
        context.checkpoint()
    assert context.last_good == tmp_path / "checkpoints" / "0-rl-000002"


def test_a_rollback_lets_the_same_step_be_saved_again(tmp_path):
    stage = rl_stage(guards={"action": "rollback"})
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    context.checkpoint()
    rescue(context, stage, parts, BROKEN)
    context.checkpoint()
    assert len(context.journal.of("checkpoint")) == 2


@pytest.mark.parametrize(
    ("action", "told"), [("report", ["guard_nonfinite"]), ("rollback", ["guard_nonfinite"]), ("off", [])]
)
def test_without_a_way_back_the_error_ends_the_run_and_its_cause_is_told(tmp_path, action, told):
    stage = rl_stage(guards={"action": action})
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    with pytest.raises(NonFinite, match="are NaN"):
        rescue(context, stage, parts, BROKEN)
    assert [event.detector for event in context.journal.of("finding")] == told


# ---------------------------------------------------------------- the loop
class Script:
    """Does or raises what it is given, in order, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.prompts, self.name = [Prompt("p", 0, "", [0], {})], "held out"

    def __call__(self, *_):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    run = next_batch = __call__


def run_stage(tmp_path, evaluation, pipeline):
    stage = rl_stage(num_steps=3, guards={"action": "rollback"}, evaluation={"every_steps": 1})
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    parts.evaluation, parts.pipeline = Script(*evaluation), Script(*pipeline)
    parts.detectors = Detectors(stage.detectors, highest_reward=1)
    parts.early_stopper = EarlyStopper(stage.early_stopping)
    parts.lengths = SimpleNamespace(state=lambda: {"mean": 7.0})
    return context, run_rl(context, stage, parts)


def test_an_evaluation_that_breaks_is_rolled_back_and_made_again(tmp_path):
    accuracy = {"accuracy_greedy": 0.5}
    context, outcome = run_stage(tmp_path, [accuracy, BROKEN, accuracy], [batch_of(4)])
    assert outcome == "finished"
    assert [event.step for event in context.journal.of("evaluation")] == [0, 1, 2, 3]
    assert [event.detector for event in context.journal.of("finding")] == ["guard_nonfinite"]


def test_a_steps_metrics_hold_what_the_sampler_told_of_its_batch_alone(tmp_path):
    context, _ = run_stage(tmp_path, [{"accuracy_greedy": 0.5}], [batch_of(4)])
    told = [event.values["rollout/draft_gain"] for event in context.journal.of("metrics")]
    assert told == [2.0, 4.0, 6.0]  # asked before each batch too: what came before it was evaluation
    assert context.journal.of("metrics")[0].values["rollout/sync_s"] >= 0
    assert context.progress.lengths == {"mean": 7.0}


def test_after_a_rollback_the_loop_still_hears_of_a_stop(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr("grpo_engine.control.SharedControl.synchronise", lambda control: heard.append(1))
    run_stage(tmp_path, [{"accuracy_greedy": 0.5}], [BROKEN, batch_of(4)])
    assert len(heard) == 5  # before the loop and after each of its four turns


def test_an_evaluation_that_breaks_on_one_rank_breaks_on_all():
    ranks = SimpleNamespace(rank=0, world_size=2, gather=lambda value: [value, ([], [], "rank 1: NaN")])
    completion = Completion([5], "", "stop", [-1.0], [-1.0])
    sampler = SimpleNamespace(sample=lambda requests, sampling: [completion] * len(requests))
    prompts = [Prompt(str(i), i, "", [i], {}) for i in range(4)]
    held_out = HeldOutEvaluation("held out", prompts, lambda p, c: [1.0] * len(c), SamplingConfig(), 0, ranks)
    with pytest.raises(NonFinite, match="rank 1: NaN"):
        held_out.run(sampler)
