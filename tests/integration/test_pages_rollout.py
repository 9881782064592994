"""Pages of runs that sample with vLLM, and of runs from before there was a choice."""

import copy
import math
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.db import Database
from app.metrics.display import newest_values
from app.models import Run
from app.runs.service import get_run
from app.settings import Settings
from tests import seed
from tests.callers import browser
from tests.seed_rollouts import mtp_values, rollout_values

VLLM: dict[str, Any] = {"backend": "vllm", "sleep": True}


class Synced(seed.AttemptWriter):
    """An attempt whose sampler holds a copy of the weights."""

    def synced(self, step: int) -> None:
        gaps = {"probe_gap_nats": 3e-6, "choice_gap_nats": 0.0}
        self.journal.append(
            "weight_sync", stage="1-rl", step=step, policy_version=30 + step, checksum="1a2b3c4d5e6f7081",
            seconds=0.0042, **gaps,
        )  # fmt: skip


def test_the_card_tells_which_version_the_sampler_holds(app: FastAPI, database: Database, settings: Settings) -> None:
    seed.queued(database, rollout=VLLM)
    with Synced(database, settings, seed.claimed(database)) as writer:
        writer.started(0, 0)
        writer.reinforced(1, 3)
        writer.synced(3)
    with browser(app) as client:
        text = client.get("/runs/1", headers={"Accept": "text/html"}).text
    assert "vLLM in process" in text
    assert "version 33" in text
    assert "checksum 1a2b3c4d5e6f7081" in text
    assert "3e−6 nats, limit 0.001" in text


def test_runs_from_before_there_was_a_choice_can_be_read_and_cloned(seeded_app: FastAPI, seeded: TestClient) -> None:
    with seeded_app.state.database.write() as session:
        config = copy.deepcopy(get_run(session, 1).config)
        del config["rollout"], config["mtp"], config["stages"][1]["sampling"]["stop"]
        session.execute(update(Run).where(Run.number == 1).values(config=config))
    with browser(seeded_app) as client:
        for path in ("/runs/1", "/runs/1/config", "/runs/new?clone=1", "/configs/diff?before=preset:demo&after=run:1"):
            assert client.get(path, headers={"Accept": "text/html"}).status_code == 200, path


def test_the_card_is_of_the_newest_step_and_of_the_stage_that_is_shown(seeded_app: FastAPI) -> None:
    with seeded_app.state.database.read() as session:
        run = get_run(session, 1)
        sampled, heads = newest_values(session, run, "1-rl", "rollout/"), newest_values(session, run, "0-sft", "mtp/")
        assert newest_values(session, run, "0-sft", "rollout/") == {}
    assert sampled == rollout_values(seed.RL_STEPS, seed.config())
    assert heads == mtp_values(seed.SFT_STEPS, seed.config())


def test_what_the_newest_step_did_not_tell_and_what_is_not_finite_is_left_out(
    database: Database, settings: Settings
) -> None:
    seed.queued(database)
    with seed.AttemptWriter(database, settings, seed.claimed(database)) as writer:
        writer.started(0, 0)
        writer.journal.metrics(1, {"rollout/draft_length_share_5": 1.0}, stage="1-rl")
        writer.journal.metrics(2, {"rollout/draft_length_share_2": 1.0, "rollout/sync_s": math.nan}, stage="1-rl")
        writer.journal.metrics(3, {"loss": 1.0}, stage="1-rl")
    with database.read() as session:
        found = newest_values(session, get_run(session, 1), "1-rl", "rollout/")
    assert found == {"rollout/draft_length_share_2": 1.0}
