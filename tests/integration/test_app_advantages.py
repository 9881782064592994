"""The arithmetic of every form of advantage, recomputed by the application, against what the engine assigned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

from grpo_engine.config import RLStage
from grpo_engine.config_training import AdvantageConfig, KLConfig
from grpo_engine.rollout_files import write_batch
from grpo_engine.training.assign import assign_advantages
from grpo_engine.types import Group, Rollout
from tests import seed
from tests.seed_rollouts import make_groups, stage_config

URL = "/api/v1/runs/1/attempts/2/batches/10/groups"
FORMS: list[dict[str, Any]] = [
    {"kind": "grpo"}, {"kind": "seed_paper"}, {"kind": "dr_grpo"}, {"kind": "rloo"}, {"kind": "rank"},
    {"kind": "grpo", "smooth_rewards": True}, {"kind": "gae"}, {"kind": "gae", "whiten": False, "gae_lambda": 0.8},
]  # fmt: skip


def stage_of(form: dict[str, Any], kl_place: str) -> RLStage:
    kl = KLConfig.model_validate({"weight": 0.05, "place": kl_place, "estimator": "k3"})
    advantage: Any = TypeAdapter(AdvantageConfig).validate_python(form)
    return stage_config(seed.config()).model_copy(update={"advantage": advantage, "kl": kl})


def valued(rollout: Rollout, number: int) -> Rollout:
    """With a critic's values; one completion of a group abstains."""
    values = [0.1 * math.sin(place + number) for place in range(len(rollout.completion.token_ids))]
    return replace(rollout, values=values, reward=None if number == 3 else rollout.reward)


def written(client: TestClient, stage: RLStage) -> list[Group]:
    """The batch at URL, made anew by the engine's own steps."""
    drafts = [
        replace(group, rollouts=[valued(rollout, number) for number, rollout in enumerate(group.rollouts)])
        for group in make_groups(10, stage)
    ]
    groups, _ = assign_advantages(drafts, stage, 0.4)
    kl = stage.kl.model_dump(mode="json", include={"weight", "estimator", "place"})
    about = {"form": stage.advantage.kind, **stage.advantage.model_dump(mode="json"), "kl": kl}
    app: Any = client.app
    [path] = app.state.settings.home.glob("runs/*/attempts/2/rollouts/batch-000010.parquet")
    write_batch(path, groups, {"batch": 10, "stage": "1-rl", "advantage": about})
    return groups


@pytest.mark.parametrize("kl_place", ["loss", "reward"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_the_application_comes_to_the_engines_advantages(
    seeded: TestClient, form: dict[str, Any], kl_place: str
) -> None:
    groups = written(seeded, stage_of(form, kl_place))
    tolerance = 1e-4 if form["kind"] == "gae" else 1e-9  # values and returns are stored in float32
    for index, group in enumerate(groups):
        told = seeded.get(f"{URL}/{index}").json()["completions"]
        for completion, rollout in zip(told, group.rollouts, strict=True):
            assert completion["advantage"] == pytest.approx(rollout.advantage, rel=1e-12)
            assert completion["expected_advantage"] == pytest.approx(rollout.advantage, rel=tolerance, abs=tolerance)
            assert completion["shaped_reward"] == rollout.shaped_reward
    page = seeded.get("/runs/1/groups/2-10-1?tokens=0", headers={"Accept": "text/html"})
    assert page.status_code == 200


def test_the_cases_differ_from_each_other_and_from_zero(seeded: TestClient) -> None:
    cases = [
        [round(rollout.advantage, 6) for group in written(seeded, stage_of(form, place)) for rollout in group.rollouts]
        for place in ("loss", "reward")
        for form in FORMS
    ]
    assert all(any(case) for case in cases)
    assert len({tuple(case) for case in cases}) == len(cases) - 2  # smoothing cancels in grpo, in both places


def test_tokens_of_ppo_carry_value_return_and_advantage(seeded: TestClient) -> None:
    groups = written(seeded, stage_of({"kind": "gae"}, "reward"))
    rollout = groups[1].rollouts[0]
    tokens = seeded.get(f"{URL}/1/completions/0/tokens").json()["items"]
    assert [token["value"] for token in tokens] == pytest.approx(rollout.values, rel=1e-6)
    assert [token["advantage"] for token in tokens] == pytest.approx(rollout.token_advantages, rel=1e-6)
    assert [token["value_target"] for token in tokens] == pytest.approx(rollout.returns, rel=1e-6)


def test_a_file_without_the_newer_columns_is_read(seeded: TestClient) -> None:
    app: Any = seeded.app
    [path] = app.state.settings.home.glob("runs/*/attempts/2/rollouts/batch-000010.parquet")
    file = pq.ParquetFile(path)
    newer = ["shaped_reward", "values", "token_advantages", "returns"]
    tables = [file.read_row_group(index).drop_columns(newer) for index in range(file.num_row_groups)]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    told = seeded.get(f"{URL}/1").json()
    assert [row["shaped_reward"] for row in told["completions"]] == [None] * 4
    assert seeded.get(f"{URL}/1/completions/0/tokens").json()["items"][0]["value"] is None
