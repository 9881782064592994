"""What stands above the tabs of every run page: who, which state, how far, is it alive, twelve indicators, the tabs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.formatting import duration
from app.metrics.display import Indicator, has_steps, indicators, recent_values
from app.models import Attempt, Checkpoint, FindingRow, JournalEvent, Run, Worker
from app.runs import logs
from app.runs.progress import stage_index
from app.runs.states import ACTIVE_ATTEMPT_STATES, TERMINAL_STATES

LAST_LINES = 6
REASONS = {
    "invalid_config": ("The config cannot run", "Clone the run, correct the field and press Check before launching."),
    "data_error": ("The data cannot be read", "Check path and columns in the config's data section."),
    "reward_error": ("A reward function broke", "Correct the function, register it again and clone the run."),
    "out_of_memory": (
        "Out of memory",
        "Lower memory.max_micro_batch_tokens or sampling.max_new_tokens, or set memory.gradient_checkpointing; then "
        "clone or resume.",
    ),
    "storage_full": ("The disk is full", "Free space below COHORT_HOME; then clone the run from its last checkpoint."),
    "non_finite": ("Loss or gradient stayed non-finite", "Lower the learning rate or raise the precision."),
    "diverged": (
        "Training diverged",
        "Start from the last good checkpoint with a lower learning rate, a larger batch or a kl.weight above 0.",
    ),
    "self_test_failed": (
        "The self-test failed",
        "Correct what it names; set self_test to warn only when you know why a check does not hold.",
    ),
    "weight_sync_failed": (
        "The sampler did not take over the weights",
        "Look at the sampler's log for what the update met; restart its servers, or sample with rollout.backend torch.",
    ),
    "rollout_unavailable": (
        "Nothing was left to sample with",
        "Start the servers again or correct rollout.addresses; without vLLM on the worker run make install-vllm there.",
    ),
    "checkpoint_invalid": ("A checkpoint is damaged", "Start from an older checkpoint."),
    "worker_lost": (
        "The worker was lost too often",
        "Look at the worker's own log; then start from the last checkpoint.",
    ),
    "engine_crash": ("The engine crashed", "The traceback's last lines say where."),
}
SAID_IN_WORDS = REASONS.keys() - {"engine_crash", "reward_error", "out_of_memory", "worker_lost"}
"""Reasons whose sentence says it all; for the others the last lines of the code that failed help."""
TONES = {"completed": "good", "failed": "bad", "cancelled": "idle", "paused": "idle", "queued": "idle"}
"""State -> colour class of the progress bar."""
DONE_WORDS = {"finished": "finished", "early_stopped": "stopped early", "target_reached": "target reached"}


@dataclass(frozen=True)
class Chip:
    key: str
    state: str
    """done, now, bad (the run failed in it) or next."""
    text: str
    shown: bool


@dataclass(frozen=True)
class AliveText:
    text: str
    at: datetime | None = None


@dataclass(frozen=True)
class Cause:
    reason: str
    title: str
    sentence: str
    last_lines: str
    remedy: str


@dataclass(frozen=True)
class Tab:
    key: str
    label: str
    href: str
    count: int | None = None
    alert: bool = False


@dataclass(frozen=True)
class Frame:
    number: int
    name: str
    tags: list[str]
    state: str
    url: str
    tab: str
    stage: str
    """Stage whose figures the page shows."""
    status_text: str
    chips: list[Chip]
    alive: list[AliveText]
    steps_done: int
    total_steps: int
    tone: str
    actions: frozenset[str]
    cause: Cause | None
    indicators: list[Indicator]
    tabs: list[Tab]
    stream: str
    """Address of the live stream; empty when the run has ended."""
    version: int = 0
    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)


def build_frame(
    session: Session, store: ArtifactStore, run: Run, *, tab: str, stage: str = "", can_run: bool = True
) -> Frame:
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(1))
    worker = session.get(Worker, attempt.worker_id) if attempt and attempt.worker_id else None
    shown = stage if stage in stage_keys(run) else current_stage(run)
    values = recent_values(session, run, shown)
    url = f"/runs/{run.number}"
    ended = run.state in TERMINAL_STATES
    return Frame(
        number=run.number,
        name=run.name,
        tags=list(run.tags),
        state=run.state,
        url=url,
        tab=tab,
        stage=shown,
        status_text=_status(run, values, shown),
        chips=_chips(session, run, shown),
        alive=_alive(run, attempt, worker),
        steps_done=min(run.steps_done, run.total_steps) if run.state != "completed" else run.total_steps,
        total_steps=max(run.total_steps, 1),
        tone=TONES.get(run.state, ""),
        actions=_actions(run.state) if can_run else frozenset(),
        cause=_cause(store, run, attempt) if run.state == "failed" else None,
        indicators=indicators(values) if has_steps(values) else [],
        tabs=_tabs(session, run, url),
        stream="" if ended else _stream(run, url, tab, shown, has_steps(values), follows=shown != stage),
        version=run.version,
        step=run.step,
        values=values,
    )


def _stream(run: Run, url: str, tab: str, stage: str, charts: bool, *, follows: bool) -> str:
    after = run.step if stage == run.stage else 0
    query = {"tab": tab, "stage": stage, "version": run.version, "after": after, "attempt": run.num_attempts}
    return f"{url}/events?{urlencode({**query, 'charts': int(charts), 'follow': int(follows)})}"


def stage_keys(run: Run) -> list[str]:
    return [f"{index}-{stage['kind']}" for index, stage in enumerate(run.config["stages"])]


def current_stage(run: Run) -> str:
    keys = stage_keys(run)
    return run.stage if run.stage in keys else keys[0]


def _actions(state: str) -> frozenset[str]:
    if state in TERMINAL_STATES:
        return frozenset({"clone", "delete"})
    found = {"clone", "cancel"} if state != "cancelling" else {"clone"}
    if state in ("queued", "starting", "running"):
        found.add("pause")
    return frozenset(found | ({"resume"} if state == "paused" else set()))


def _status(run: Run, values: Mapping[str, Any], shown: str) -> str:
    if run.state == "queued":
        return run.message if run.restarts and run.message else f"waiting for a worker with {_needs(run)}"
    if run.state in TERMINAL_STATES:
        words = DONE_WORDS.get(run.reason or "", "")
        took = duration((run.ended_at - run.started_at).total_seconds()) if run.ended_at and run.started_at else ""
        sentence = (run.message or "") if run.state != "failed" else ""
        return " · ".join(part for part in (words, f"after {took}" if took else "", sentence) if part)
    parts = [f"{run.stage} · step {run.step} of {run.stage_steps}"]
    if run.state == "running":
        parts.append(_time_left(run, values) if shown == run.stage else "")
    elif run.message:
        parts.append(run.message)
    return " · ".join(part for part in parts if part)


def _needs(run: Run) -> str:
    needs = run.needs
    ranks = f"{needs['num_ranks']} × " if needs.get("num_ranks", 1) > 1 else ""
    labels = ", labels " + ", ".join(needs["labels"]) if needs.get("labels") else ""
    return f"{ranks}{needs.get('device', 'cpu')}{labels}"


def _time_left(run: Run, values: Mapping[str, Any]) -> str:
    recent = [value for value in values.get("time/step_s", []) if value is not None][-10:]
    left = run.stage_steps - run.step
    if not recent or left <= 0:
        return ""
    last = run.stage is not None and stage_index(run.stage) + 1 == len(run.config["stages"])
    return f"about {duration(left * sum(recent) / len(recent))} left" + ("" if last else " in this stage")


def _chips(session: Session, run: Run, shown: str) -> list[Chip]:
    started = _stage_starts(session, run)
    keys = stage_keys(run)
    now = keys.index(current_stage(run))
    chips = []
    for index, key in enumerate(keys):
        steps = run.config["stages"][index]["num_steps"]
        done = index < now or run.state == "completed"
        state = "done" if done else _state_of_current(run) if index == now and run.num_attempts else "next"
        end = started.get(keys[index + 1]) if index + 1 < len(keys) else run.ended_at
        took = duration((end - started[key]).total_seconds()) if done and end and key in started else ""
        done_steps = run.step if index == now else steps
        text = (
            f"{done_steps} steps" + (f", {took}" if took else "")
            if done
            else f"{run.step}/{steps}"
            if state != "next"
            else f"{steps} steps"
        )
        chips.append(Chip(key, state, text, key == shown))
    return chips


def _state_of_current(run: Run) -> str:
    return "bad" if run.state == "failed" else "now" if run.state not in TERMINAL_STATES else "left"


def _stage_starts(session: Session, run: Run) -> dict[str, datetime]:
    query = select(JournalEvent.stage, func.min(JournalEvent.time)).join(Attempt, Attempt.id == JournalEvent.attempt_id)
    query = query.where(Attempt.run_id == run.id, JournalEvent.type == "stage_started").group_by(JournalEvent.stage)
    return {stage: at for stage, at in session.execute(query) if stage}


def _alive(run: Run, attempt: Attempt | None, worker: Worker | None) -> list[AliveText]:
    if attempt is None:
        return [AliveText("queued", run.queued_at)] if run.queued_at else []
    where = f" on {worker.name}" if worker else " (imported)" if run.imported else ""
    found = [AliveText(f"attempt {attempt.number}{where}")]
    if attempt.state in ACTIVE_ATTEMPT_STATES:
        found += [AliveText("beat", attempt.last_beat_at)] if attempt.last_beat_at else []
        found += [AliveText("last step", run.last_step_at)] if run.last_step_at else []
    elif attempt.ended_at:
        found.append(AliveText("ended", attempt.ended_at))
    return found


def _cause(store: ArtifactStore, run: Run, attempt: Attempt | None) -> Cause:
    reason = run.reason or (attempt.reason if attempt else None) or "engine_crash"
    title, remedy = REASONS.get(reason, (reason.replace("_", " ").capitalize(), ""))
    sentence = run.message or (attempt.message if attempt else None) or ""
    if sentence and reason in SAID_IN_WORDS:
        return Cause(reason, title, sentence, "", remedy)
    traceback = (attempt.traceback if attempt else None) or ""
    if not traceback and attempt is not None:
        traceback = logs.tail(store, logs.log_key(run.id, attempt.number), LAST_LINES).text
    return Cause(reason, title, sentence, "\n".join(traceback.rstrip().splitlines()[-LAST_LINES:]), remedy)


def _tabs(session: Session, run: Run, url: str) -> list[Tab]:
    checkpoints = select(func.count()).select_from(Checkpoint).where(Checkpoint.run_id == run.id)
    saved = session.scalar(checkpoints.where(Checkpoint.state != "removed"))
    open_findings = select(func.count()).select_from(FindingRow).where(FindingRow.run_id == run.id)
    num_open = session.scalar(open_findings.where(FindingRow.state == "open"))
    return [
        Tab("overview", "Overview", url),
        Tab("charts", "Charts", f"{url}/charts"),
        Tab("rollouts", "Rollouts", f"{url}/rollouts"),
        Tab("checkpoints", "Checkpoints", f"{url}/checkpoints", saved),
        Tab("findings", "Findings", f"{url}/findings", num_open, alert=True),
        Tab("timeline", "Timeline", f"{url}/timeline", run.num_attempts if run.num_attempts > 1 else None),
        Tab("log", "Log", f"{url}/log"),
        Tab("config", "Config", f"{url}/config"),
    ]
