"""Which checks a stage needs, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_engine.config import RLStage
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import PromptSource, Sampler
from grpo_engine.self_test import tokens, training
from grpo_engine.self_test.checks import Check, over_ranks, report
from grpo_engine.self_test.training import Differentiable
from grpo_engine.stages.context import StageContext, log
from grpo_engine.types import Prompt, TrainRow, global_denominator


def run_self_test(
    context: StageContext, policy: Policy, learner: Differentiable, source: PromptSource, sampler: Sampler | None,
    encode_demonstration: Callable[[Prompt], list[int]] | None,
) -> None:  # fmt: skip
    """Run and journal the checks; `sampler` in stages of reinforcement learning, demonstrations in supervised ones.

    Raises SelfTestFailed as the config's self_test says. Collective."""
    config = context.config
    if config.self_test == "off":
        return
    started = time.perf_counter()
    context.promise(120, "testing itself")
    prompts = source.take(context.progress.prompt_position, training.NUM_PROMPTS)
    checks = _token_checks(policy)
    if sampler is not None:
        checks += _sampled(context, learner, sampler, prompts)
    elif encode_demonstration is not None:
        rows = [TrainRow(prompt.token_ids, encode_demonstration(prompt)) for prompt in prompts]
        checks.append(training.check_gradient(learner, rows, global_denominator(rows), config.dtype))
    checks = over_ranks(checks, context.communicator)

    def journal(check: Check) -> None:
        context.journal.append(
            "self_test", stage=context.key, name=check.name, passed=check.passed, detail=check.detail
        )

    report(checks, journal, context.warn, stop=config.self_test == "stop")
    log.info("self-test: %d checks in %.1f s", len(checks), time.perf_counter() - started)


def _token_checks(policy: Policy) -> list[Check]:
    vocabulary = policy.model.config.get_text_config().vocab_size
    checks = [
        tokens.check_end_tokens(policy.tokenizer, policy.end_token_ids, vocabulary),
        tokens.check_special_tokens(policy.tokenizer, vocabulary),
    ]
    template = tokens.check_chat_template(policy.tokenizer)
    return checks if template is None else [*checks, template]


def _sampled(context: StageContext, learner: Differentiable, sampler: Sampler, prompts: list[Prompt]) -> list[Check]:
    config = context.config
    stage = config.stages[context.progress.stage_index]
    assert isinstance(stage, RLStage)
    rows = training.sample_rows(sampler, prompts, stage.sampling, config.seed)
    denominator = global_denominator(rows)
    return [
        training.check_sampler(learner, rows, config.dtype),
        training.check_ratio(learner, rows, config.dtype),
        training.check_gradient(learner, rows, denominator, config.dtype),
    ]
