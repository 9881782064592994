"""A language model as judge: each answer is scored against a rubric, once, and what cannot be had abstains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_engine.config_rewards import JudgeReward
from grpo_engine.errors import RewardError
from grpo_engine.reward.extraction import Extraction
from grpo_engine.reward.learned import judge_messages, texts
from grpo_engine.reward.learned.judge_cache import JudgeCache, key_of
from grpo_engine.reward.learned.judge_client import Budget, JudgeClient, Messages, Reply, Silence
from grpo_engine.reward.learned.judge_messages import HIGHEST, NoVerdict, Verdict, messages, verdict
from grpo_engine.reward.learned.texts import answer_of, question_of
from grpo_engine.reward.metric import Judgement
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardFault, RewardPart

REQUESTS, CACHED, FAILED, COST, LATE = (
    "reward/judge_requests", "reward/judge_cached", "reward/judge_failed", "reward/judge_cost", "reward/late"
)  # fmt: skip


class Judge:
    """A reward part. Equal answers to equal questions are asked once; no answer gets 0 unasked.

    Raises RewardError when the environment variable holds no usable key."""

    def __init__(
        self, config: JudgeReward, cache: JudgeCache | None = None, *, share: int = 1,
        environment: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        """`share`: ranks that divide the limits of requests and cost; `environment` holds the key."""
        self.name: str = config.kind
        self.weight = config.weight
        settings = [config.model, config.rubric, config.extract]
        own = module_source(__file__, judge_messages.__file__, texts.__file__)
        self.version = version_of(config.kind, own, "\0".join(settings).encode())
        self._config = config
        self._cache = cache or JudgeCache(config.kind)
        budget = Budget(
            None if config.max_requests is None else -(-config.max_requests // share),
            None if config.max_cost is None else config.max_cost / share,
            -(-self._cache.num_requests // share), self._cache.cost / share,
        )  # fmt: skip
        self._client = JudgeClient(config, budget, _key(config.api_key_variable, environment))
        self._counts: dict[str, float] = {}
        self._faults: dict[str, RewardFault] = {}

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        answers = [answer_of(self._config.extract, *pair) for pair in zip(prompts, completions, strict=True)]
        asked = [self._messages(*pair) for pair in zip(prompts, answers, strict=True)]
        keys = [None if each is None else key_of(self._config.model, each) for each in asked]
        new = {
            key: each
            for key, each in zip(keys, asked, strict=True)
            if key is not None and each is not None and self._cache.get(key) is None
        }
        silences = self._ask(new)
        known = [key for key in keys if key is not None and key not in silences]
        self._count(CACHED, len(known) - (len(new) - len(silences)))
        return [self._part(key, answer, silences) for key, answer in zip(keys, answers, strict=True)]

    def take_counts(self) -> dict[str, float]:
        """Requests sent, answers found in the cache, completions that abstained, cost, late completions."""
        counts, self._counts = self._counts, {}
        return counts

    def take_faults(self) -> list[RewardFault]:
        faults, self._faults = list(self._faults.values()), {}
        return faults

    def close(self) -> None:
        self._cache.close()

    def _messages(self, prompt: Prompt, answer: Extraction) -> Messages | None:
        """None: there is nothing to judge."""
        if answer.text is None:
            return None
        gold: Any = prompt.columns.get("answer")
        reference = gold if isinstance(gold, str) and gold.strip() else None
        config = self._config
        return messages(config.rubric, question_of(prompt), answer.text, reference)

    def _ask(self, new: Mapping[str, Messages]) -> dict[str, Silence]:
        """Fills the cache; why there is no verdict, by key."""
        silences: dict[str, Silence] = {}
        if not new:
            return silences
        keys, budget = list(new), self._client.budget
        requests, cost = budget.num_requests, budget.cost

        def settle(index: int, said: Reply | Silence) -> None:
            if isinstance(said, Reply):
                try:
                    self._cache.put(keys[index], verdict(said.text), said.num_requests, said.cost)
                    return
                except NoVerdict as error:
                    said = Silence("not a verdict", f"The judge's reply counts for nothing: {error}")
            silences[keys[index]] = said

        self._client.ask([new[key] for key in keys], settle)
        self._count(REQUESTS, budget.num_requests - requests)
        if budget.cost > cost:
            self._count(COST, budget.cost - cost)
        return silences

    def _part(self, key: str | None, answer: Extraction, silences: Mapping[str, Silence]) -> RewardPart:
        if key is None:
            return self._said(Judgement(0.0, f"{answer.reason}; nothing was sent to the judge."))
        if (silence := silences.get(key)) is not None:
            self._count(FAILED, 1)
            if silence.is_late:
                self._count(LATE, 1)
            self._faults.setdefault(silence.kind, RewardFault(self.name, silence.kind, f"{silence.message}."))
            return self._said(Judgement(None, f"{silence.message}."))
        found: Verdict | None = self._cache.get(key)
        assert found is not None, "what was asked is either in the cache or silent"
        score = found.value * HIGHEST
        said = f"{self._config.model} gave {score:g} of {HIGHEST}: {found.reason}"
        return self._said(Judgement(found.value, said, answer.span))

    def _said(self, judgement: Judgement) -> RewardPart:
        value, explanation, span = judgement
        return RewardPart(self.name, value, self.weight, explanation, span, self.version)

    def _count(self, name: str, number: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + number


def _key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    """None where the judge wants none. A key that no header can hold would be shown in the error of every request."""
    key = environment.get(variable, "").strip() if variable else ""
    if not (key.isascii() and (key.isprintable())):
        raise RewardError(f"the environment variable {variable} holds characters that no key has; set it again")
    return key or None
