"""The attack list and the forged verdicts, on every tier that this host has."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.attack import REACHED, Attack
from grpo_engine.reward.sandbox.attacks import ATTACKS, ESSENTIAL
from grpo_engine.reward.sandbox.forgeries import FORGERIES, Forgery, checks_of
from grpo_engine.reward.sandbox.jobs import CheckJob
from grpo_engine.reward.sandbox.pool import SandboxPool
from grpo_engine.reward.sandbox.self_test import attack_jobs, choose_tier, decoys, fault, forgery_jobs, passes
from tests.sandbox_tiers import available

pytestmark = [pytest.mark.timeout(600), pytest.mark.alone]

CONFIG = SandboxConfig(num_slots=2, cpu_limit_s=2, memory_mib=256, file_mib=4, max_processes=16)


class Attacked:
    """All attacks on one tier, tried once."""

    def __init__(self, tier: str) -> None:
        with decoys(CONFIG) as names, SandboxPool(CONFIG, tier) as pool:  # type: ignore[arg-type]
            secret = Path(str(names["SECRET"]))
            self.attacks = dict(zip(ATTACKS, pool.run_all(attack_jobs(ATTACKS, names)), strict=True))
            # Twice: what the first round left behind must not help the second.
            pool.run_all(forgery_jobs(FORGERIES))
            self.forgeries = dict(zip(FORGERIES, pool.run_all(forgery_jobs(FORGERIES)), strict=True))
            self.secret_is_whole = secret.read_text() == "a secret" and secret.stat().st_mode & 0o777 == 0o666
            self.was_written = Path(str(names["OUTSIDE"])).exists()
            self.num_replaced = pool.num_replaced


@pytest.fixture(scope="module", params=available())
def attacked(request: pytest.FixtureRequest) -> Attacked:
    return Attacked(request.param)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_nothing_is_reached_by(attacked: Attacked, attack: Attack) -> None:
    assert fault(attack, attacked.attacks[attack]) == ""


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_no_verdict_is_forged_by(attacked: Attacked, forgery: Forgery) -> None:
    outcome = attacked.forgeries[forgery]
    assert not passes(outcome)
    assert outcome.end not in ("refused", "tests_failed_to_run"), "to abstain would be worth more than to be wrong"
    assert not any(passed for passed, _ in outcome.reports)


def test_the_host_is_as_before_and_no_slot_was_lost(attacked: Attacked) -> None:
    assert attacked.secret_is_whole
    assert not attacked.was_written
    assert attacked.num_replaced == 0


def test_an_attack_that_works_would_be_seen() -> None:
    with decoys(CONFIG) as names:
        for attack in (ESSENTIAL[0], *(one for one in ATTACKS if one.name in ("/etc/passwd", "fork", "a shell"))):
            told = subprocess.run(["python3", "-c", attack.program(names)], capture_output=True, text=True, timeout=60)
            assert REACHED in told.stdout, attack.name


def test_tests_that_give_their_answer_away_would_be_seen() -> None:
    answer = secrets.token_hex(8)
    honest = CheckJob(f"def guess(): return 'answer-{answer}'", checks_of(answer), 60.0)
    with SandboxPool(CONFIG, available()[0]) as pool:
        assert passes(pool.run(honest))


def test_this_host_has_a_tier() -> None:
    report = choose_tier(SandboxConfig(num_slots=1))
    assert report.tier == available()[0], report.details


def test_where_bubblewrap_may_not_make_namespaces_landlock_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    report = choose_tier(SandboxConfig(num_slots=1))
    assert report.tier == "landlock"
    assert "No permissions" in report.details["bubblewrap"]
