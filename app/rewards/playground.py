"""One pasted completion judged by reward parts: `python -m grpo_engine score` in a child process with a time limit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from app.errors import Forbidden, Invalid, NotFound
from app.limited import ask_engine, raise_problems
from app.models import User
from app.rewards.service import get_source
from app.rollouts.views import PartView, Segment
from app.security import allowed
from app.settings import Settings
from grpo_engine.config_errors import read_yaml
from grpo_engine.errors import InvalidConfig, Problem

CHOICES: dict[str, dict[str, Any]] = {
    kind: {"kind": kind}
    for kind in (
        "accuracy", "format", "code_execution", "step_validity", "logical_consistency", "language_consistency",
        "readability", "information_density", "repetition", "length", "instruction_following", "code_quality",
    )
}  # fmt: skip
"""The rule-based parts as the boxes of the form choose them."""
CHOICES["length"] |= {"max_tokens": 512, "buffer_tokens": 128}
LEARNED = ("bertscore", "reward_model", "judge")
FIELDS = ("rewards", "reward_clip", "data")
"""What the form's YAML may hold. Not `sandbox`: nobody loosens the web host's own."""
CONTEXT_CHARACTERS = 160
"""Shown before and after what a part judged."""
MAX_SPAN = 600
"""Of a longer span both ends are shown."""


@dataclass(frozen=True)
class Judged:
    """What the parts made of the completion."""

    reward: float | None
    shaped_reward: float | None
    num_tokens: int
    parts: list[tuple[PartView, list[Segment]]]
    """Each part with the text it judged, marked in its surroundings."""
    behaviours: dict[str, int]
    faults: list[dict[str, str]]
    seconds: float


# ---------------------------------------------------------------- the request
def read_rewards(text: str) -> dict[str, Any]:
    """The config of a playground's YAML: a list of parts, or `rewards` with reward_clip and data. Raises Invalid."""
    try:
        data = read_yaml(text, "the YAML")
    except InvalidConfig as error:
        raise Invalid.of(error.problems) from error
    return rewards_of(data)


def rewards_of(data: Any) -> dict[str, Any]:
    """As `read_rewards`, of the YAML's value."""
    if isinstance(data, list):
        data = {"rewards": data}
    if not isinstance(data, Mapping) or not isinstance(data.get("rewards"), list):
        raise Invalid.of([Problem("rewards", "", "no parts are named", "write rewards: and a list of parts")])
    unknown = [key for key in data if key not in FIELDS]
    if unknown:
        remedy = f"keep only {', '.join(FIELDS)}"
        raise Invalid.of([Problem(str(key), "", "has no meaning here", remedy) for key in unknown])
    return dict(data)


def read_columns(text: str, gold: str) -> dict[str, Any]:
    """The dataset row of JSON text and the gold answer beside it. Raises Invalid."""
    try:
        columns = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Invalid.of([Problem("columns", "", f"is not JSON: {error}", 'write {"answer": "42"}')]) from error
    if not isinstance(columns, dict):
        raise Invalid.of([Problem("columns", "", "is not a JSON object", 'write {"answer": "42"}')])
    return columns | ({"answer": gold} if gold else {})


def rewards_of_stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage of a stored config is rewarded for, as `read_rewards` takes it."""
    needs_data = any(part["kind"] == "gym" for part in stage["rewards"])
    kept = ("rewards", "reward_clip", "data") if needs_data else ("rewards", "reward_clip")
    return {name: stage[name] for name in kept if stage.get(name) is not None}


def check_parts(session: Session, user: User, config: Mapping[str, Any]) -> dict[str, str]:
    """Source text of the custom parts. Raises Invalid for parts that need a model or are not registered, Forbidden
    where the user may not have code executed here."""
    sources: dict[str, str] = {}
    problems = []
    for index, part in enumerate(config["rewards"]):
        kind, name = (part.get("kind"), str(part.get("name", ""))) if isinstance(part, Mapping) else (None, "")
        field = f"rewards.{index}"
        if kind in LEARNED:
            problems.append(
                Problem(field, str(kind), "needs a model, and the web application has none", "leave it out")
            )
        if kind == "custom":
            if not allowed(user, "code"):
                raise Forbidden("Trying a reward of one's own executes its code here; that needs the permission code.")
            try:
                sources[name] = get_source(session, name).source
            except NotFound:
                problems.append(Problem(f"{field}.name", name, "is not a registered reward", "register it first"))
    if problems:
        raise Invalid.of(problems)
    return sources


def judge(settings: Settings, config: Mapping[str, Any], sources: Mapping[str, str], item: dict[str, Any]) -> Judged:
    """Raises Invalid with what the engine refuses, Unavailable when it takes too long or dies."""
    request = {"config": dict(config), "sources": dict(sources), "items": [item]}
    with tempfile.TemporaryDirectory(prefix="cohort-score-") as name:
        answer = ask_engine(
            ["score"], Path(name), settings.preflight_limit_s, json.dumps(request), doing="Judging",
            advice="a program or a reward of one's own that never returns is the usual cause",
        )  # fmt: skip
    raise_problems(answer, ("config.", "items.0."))
    return _judged(answer, item["completion"])


# ---------------------------------------------------------------- the answer
def _judged(answer: Mapping[str, Any], text: str) -> Judged:
    item = answer["items"][0]
    parts = [(_part_view(part, index), _marked(part, text)) for index, part in enumerate(item["parts"])]
    kept = {name: item[name] for name in ("reward", "shaped_reward", "num_tokens", "behaviours")}
    return Judged(**kept, parts=parts, faults=answer["faults"], seconds=answer["seconds"])


def _part_view(part: Mapping[str, Any], index: int) -> PartView:
    kept = {name: part[name] for name in ("name", "value", "counted", "weight", "explanation", "version")}
    return PartView(css=f"p{index % 6}", **kept)


def _marked(part: Mapping[str, Any], text: str) -> list[Segment]:
    kind = "span" if part["value"] is None else "right" if part["value"] >= 0.5 else "wrong"
    return [] if part["span"] is None else marked(text, tuple(part["span"]), kind, part["name"])


def marked(text: str, span: tuple[int, int], kind: str, title: str) -> list[Segment]:
    """What was judged with a little of what stands around it; long stretches are cut in their middle."""
    start, end = max(0, span[0]), min(len(text), span[1])
    before, after = text[max(0, start - CONTEXT_CHARACTERS) : start], text[end : end + CONTEXT_CHARACTERS]
    before = "…" + before if start > CONTEXT_CHARACTERS else before
    after = after + "…" if end + CONTEXT_CHARACTERS < len(text) else after
    judged = text[start:end]
    if len(judged) > MAX_SPAN:
        judged = f"{judged[: MAX_SPAN // 2]} … {judged[-MAX_SPAN // 2 :]}"
    cuts = [Segment(before, "think"), Segment(judged, kind, title), Segment(after, "think")]
    return [cut for cut in cuts if cut.text]
