"""A home and database as after real training: files by the engine's own writers, rows by ingestion.

`finished_run`: two stages, attempt 1 lost in the middle, attempt 2 to the end (so some steps were trained twice),
one point that is not a number, evaluations, early stopping, a finding, checkpoints, a log. `running_run`: half way.
Nothing is random: the same call writes the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from app.db import Database
from app.ingest import ingest_attempt
from app.liveness import ProcessIdentity
from app.models import Attempt, Run, Worker, utc_now
from app.runs.service import create_run
from app.runs.states import lose_attempt, move_attempt, transition
from app.settings import Settings
from app.users.service import ensure_first_user
from grpo_engine.config import RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.events import Journal
from grpo_engine.manifest import Manifest, list_files, manifest_sha256, total_bytes, write_manifest
from grpo_engine.rollout_files import batch_name, write_batch
from tests.seed_rollouts import make_groups, mtp_values, rl_values, rollout_values, shared_values, stage_config
from workers.claim import claim

SFT_STEPS = 30
RL_STEPS = 24
CHECKPOINT_EVERY = 8
LOST_AFTER = 13
"""Step of the RL stage after which attempt 1 is lost; it had saved step 8."""
RUNNING_AT = 15


def config(**changes: Any) -> RunConfig:
    """The demo's shape, made small."""
    rl = {
        "kind": "rl", "data": {"source": "addition", "num_digits": 3}, "num_steps": RL_STEPS, "prompts_per_step": 4,
        "group_size": 4, "sampling": {"max_new_tokens": 64}, "kl": {"weight": 0.001},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY},
        "early_stopping": {"mode": "stop", "warmup_steps": 10, "patience": 5},
        "rewards": [
            {"kind": "accuracy"}, {"kind": "format"}, {"kind": "length", "max_tokens": 64, "buffer_tokens": 16},
        ],
    }  # fmt: skip
    sft = {"kind": "sft", "data": {"source": "addition", "num_digits": 3}, "num_steps": SFT_STEPS, "rows_per_step": 16}
    data = {
        "name": "learn to think",
        "tags": ["demo", "seeded"],
        "model": {"source": "tiny_llama"},
        "rollout": {"backend": "torch", "drafts": {"kind": "mtp"}},
        "mtp": {"depth": 2},
        "stages": [sft, rl],
    }
    return load_config({**data, **changes})


def finished_run(database: Database, settings: Settings, **changes: Any) -> Run:
    """Completed by its second attempt."""
    run_id = queued(database, **changes)
    first = claimed(database)
    with AttemptWriter(database, settings, first) as writer:
        writer.started(0, 0)
        writer.supervised(1, SFT_STEPS)
        writer.reinforced(1, LOST_AFTER)
    with database.write() as session:
        lose_attempt(session, first.id, actor="reaper", message="its worker stopped beating")
    second = claimed(database)
    with AttemptWriter(database, settings, second) as writer:
        writer.started(1, CHECKPOINT_EVERY)
        writer.reinforced(CHECKPOINT_EVERY + 1, RL_STEPS)
        writer.journal.append("finished", reason="finished", message="all steps were trained")
    with database.write() as session:
        move_attempt(session, second.id, "finished", token=second.token)
        transition(
            session, run_id, "completed", actor="worker:seed", reason="finished", message="all steps were trained"
        )
    return _reloaded(database, run_id)


def running_run(database: Database, settings: Settings, **changes: Any) -> Run:
    """In its RL stage, held by an online worker."""
    run_id = queued(database, **{"name": "still learning", **changes})
    with AttemptWriter(database, settings, claimed(database)) as writer:
        writer.started(0, 0)
        writer.supervised(1, SFT_STEPS)
        writer.reinforced(1, RUNNING_AT)
    return _reloaded(database, run_id)


def failed_run(database: Database, settings: Settings, **changes: Any) -> Run:
    """Out of memory in its first RL step."""
    run_id = queued(database, **{"name": "too large", **changes})
    attempt = claimed(database)
    trace = 'Traceback (most recent call last):\n  File "learner.py", line 97\ntorch.OutOfMemoryError: no memory'
    end: dict[str, Any] = {"reason": "out_of_memory", "message": "the device has no memory left"}
    with AttemptWriter(database, settings, attempt) as writer:
        writer.started(0, 0)
        writer.supervised(1, 3)
        writer.journal.append("failed", **end, traceback=trace)
        writer.log(trace)
    with database.write() as session:
        move_attempt(session, attempt.id, "failed", token=attempt.token, traceback=trace, **end)
        transition(session, run_id, "failed", actor="worker:seed", **end)
    return _reloaded(database, run_id)


# ---------------------------------------------------------------- rows
def queued(database: Database, **changes: Any) -> Any:
    with database.write() as session:
        return create_run(session, ensure_first_user(session), config(**changes)).id


def _reloaded(database: Database, run_id: Any) -> Run:
    with database.read() as session:
        return session.get_one(Run, run_id)


def worker(database: Database, name: str = "seed") -> Worker:
    """An online worker with one CPU device, made once."""
    process = ProcessIdentity.own()
    device = {"id": "cpu:0", "kind": "cpu", "name": "AMD EPYC", "memory_bytes": 25769803776}
    with database.write() as session:
        known = session.query(Worker).filter_by(name=name).first()
        row = known or Worker(
            name=name, host="localhost", boot_id=process.boot_id, pid=process.pid, versions={"cohort": "0.1.0"},
            process_started=process.process_started, state="online", labels=["cpu"], devices=[device], beats=3,
            last_beat_at=utc_now(),
        )  # fmt: skip
        session.add(row)
    return row


def claimed(database: Database) -> Attempt:
    worker_id = worker(database).id
    with database.write() as session:
        attempt = claim(session, worker_id, ["cpu:0"], ["cpu"])
        assert attempt is not None
        move_attempt(session, attempt.id, "running", token=attempt.token)
        transition(session, attempt.run_id, "running", actor="worker:seed", token=attempt.token)
    return attempt


# ---------------------------------------------------------------- what an engine writes
@dataclass
class AttemptWriter:
    """Writes one attempt's directory; what is in it is ingested at the end of the `with` block."""

    database: Database
    settings: Settings
    attempt: Attempt

    def __post_init__(self) -> None:
        self.folder: Path = self.settings.attempt_folder(self.attempt.run_id, self.attempt.number)
        self.journal = Journal(self.folder)
        with self.database.read() as session:
            self.config = load_config(session.get_one(Run, self.attempt.run_id).config)
        (self.folder / "config.json").write_text(self.config.canonical_json())

    def log(self, text: str) -> None:
        with open(self.folder / "engine.log", "a") as file:
            file.write(text + "\n")

    def started(self, stage_index: int, step: int) -> None:
        total = self.config.total_steps()
        self.journal.append(
            "started", config_hash=self.config.hash(), stage_index=stage_index, step=step, total_steps=total,
            versions={"torch": "2.13.0"}, git_commit="c0ffee" + "0" * 34,
        )  # fmt: skip
        self.log(f"INFO engine started at stage {stage_index}, step {step} of {total} in all")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        self.ingest()

    def ingest(self) -> None:
        while ingest_attempt(self.database, self.attempt.id, self.folder):
            pass

    def tested(self, stage: str, ratio: str = "") -> None:
        """The self-test of a stage; `ratio`: what the on-policy ratio is when it is wrong."""
        tokens = {"end_tokens": "a completion ends at <eos>", "special_tokens": "3 special tokens, each read back"}
        training = {"gradient_invariance": "the same within 2e-7 in 1, 2 and 4 micro-batches"}
        for name, detail in tokens.items() if stage == "0-sft" else (tokens | training).items():
            self.journal.append("self_test", stage=stage, name=name, passed=True, detail=detail)
        if stage == "1-rl":
            detail = f"mean ratio {ratio or '1'}; it must be 1"
            self.journal.append("self_test", stage=stage, name="on_policy_ratio", passed=not ratio, detail=detail)

    def supervised(self, first: int, last: int) -> None:
        stage = "0-sft"
        self.journal.append("stage_started", stage=stage, step=first - 1, num_steps=SFT_STEPS)
        self.tested(stage)
        for step in range(first, last + 1):
            values = {"loss": 3.0 * math.exp(-step / 12), "sft/token_accuracy": 1 - 0.8 * math.exp(-step / 12)}
            self.journal.metrics(step, values | self._shared(step), stage=stage)
            self._trained(stage, step, [])
        if last == SFT_STEPS:
            self.checkpoint(stage, last)

    def reinforced(self, first: int, last: int) -> None:
        stage = "1-rl"
        self.journal.append("stage_started", stage=stage, step=first - 1, num_steps=RL_STEPS)
        self.tested(stage)
        if first == 1:
            self._evaluated(stage, 0)
        for step in range(first, last + 1):
            self._rl_step(stage, step)
            if step % CHECKPOINT_EVERY == 0:
                self._evaluated(stage, step)
                self.checkpoint(stage, step)

    def _rl_step(self, stage: str, step: int) -> None:
        groups = make_groups(step, stage_config(self.config), self.attempt.number)
        path = f"rollouts/{batch_name(step)}"
        facts = {"batch": step, "stage": stage, "policy_version": SFT_STEPS + step - 1}
        facts["advantage"] = {"form": "grpo", "kind": "grpo", "kl": {"weight": 0.001, "place": "loss"}}
        write_batch(self.folder / path, groups, facts)
        count = sum(len(group.rollouts) for group in groups)
        self.journal.append(
            "rollouts", stage=stage, batch=step, path=path, num_groups=len(groups), num_completions=count
        )
        dropped = sum(group.dropped is not None for group in groups)
        rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
        values = rl_values(step, rewards, dropped / len(groups)) | rollout_values(step, self.config)
        self.journal.metrics(step, values | self._shared(step), stage=stage)
        self._early_stopping(stage, step, values["reward/mean"])
        if step == 3:
            self._finding(stage, step)
        self._trained(stage, step, [step], dropped)
        self.log(f"INFO step {step} reward {values['reward/mean']:.3f}")

    def _shared(self, step: int) -> dict[str, float]:
        return shared_values(step) | mtp_values(step, self.config)

    def _trained(self, stage: str, step: int, batches: list[int], dropped: int = 0) -> None:
        lost = {"zero_variance": dropped} if dropped else {}
        times = {"started_boot_s": 1000.0 + step, "ended_boot_s": 1000.5 + step}
        self.journal.append("trained", stage=stage, step=step, batches=batches, dropped=lost, **times)

    def _evaluated(self, stage: str, step: int) -> None:
        share = min(1.0, 0.3 + 0.03 * step)
        metrics = {"accuracy_greedy": share, "accuracy_sampled": share * 0.9, "mean_length_tokens": 8.0 + step}
        self.journal.append(
            "evaluation", stage=stage, step=step, benchmark="held-out addition", num_prompts=256, metrics=metrics
        )

    def _early_stopping(self, stage: str, step: int, reward: float) -> None:
        self.journal.append(
            "early_stopping", stage=stage, step=step, rule="literal", mode="stop", armed=step > 10,
            smoothed_reward=reward, improvement=0.02 if step > 5 else None, threshold=0.001, patience=5,
            patience_left=5, would_stop=False,
        )  # fmt: skip

    def _finding(self, stage: str, step: int) -> None:
        self.journal.append(
            "finding", stage=stage, step=step, detector="zero_variance", severity="warning", onset_step=2,
            title="Most groups have no reward variance", evidence="3 of 4 groups in steps 2 and 3",
            remedy="Mix in easier prompts or raise the temperature.",
        )  # fmt: skip

    def checkpoint(self, stage: str, step: int) -> None:
        """A folder that holds the right names and a true manifest; its weights are made up."""
        name = f"checkpoints/{stage}-{step:06d}"
        folder = self.folder / name
        (folder / "trainer").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * (8 + step))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "README.md").write_text("# A checkpoint\n")
        (folder / "trainer" / "state.json").write_text(f'{{"step": {step}}}')
        if self.config.mtp.depth:
            (folder / "trainer" / "mtp").mkdir()
            (folder / "trainer" / "mtp" / "mtp.safetensors").write_bytes(bytes(1200))
        self._manifest(folder, stage, step)
        self.journal.append(
            "checkpoint", stage=stage, step=step, path=name, bytes=total_bytes(folder),
            sha256=manifest_sha256(folder), metrics={"reward/mean": 0.5},
        )  # fmt: skip

    def _manifest(self, folder: Path, stage: str, step: int) -> None:
        files = list_files(folder)
        version = step + (SFT_STEPS if stage == "1-rl" else 0)
        facts: dict[str, Any] = {"stage": stage, "step": step, "policy_version": version, "files": files}
        write_manifest(folder, Manifest(created_at=utc_now(), config_hash=self.config.hash(), **facts))
