"""The pool stays whole, whatever its programs do and whoever ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.launch import process_table
from grpo_engine.reward.sandbox import slot
from grpo_engine.reward.sandbox.attacks import ATTACKS
from grpo_engine.reward.sandbox.jobs import CheckJob, ProgramJob
from grpo_engine.reward.sandbox.pool import SandboxPool
from grpo_engine.reward.sandbox.self_test import attack_jobs, decoys, fault
from tests.sandbox_tiers import available
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]

CONFIG = SandboxConfig(num_slots=2, cpu_limit_s=2, memory_mib=256, file_mib=4, max_processes=16)
HONEST = CheckJob("def f(x): return x + 1", 'f = __program__("f")\n__report__(f(1) == 2, "f(1)")', 60.0)
LASTING = {attack.name for attack in ATTACKS if "time" in attack.ends} | {"many files", "memory bit by bit"}


@pytest.fixture(params=available())
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with SandboxPool(CONFIG, request.param) as made:
        yield made


def descendants() -> set[int]:
    """Living processes below this one."""
    table = process_table()
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, (parent, state) in table.items() if parent in new and state not in "ZX"} - found
        found |= new
    return found


def is_whole(pool: SandboxPool) -> bool:
    outcomes = pool.run_all([HONEST] * 4)
    return all(outcome.complete and outcome.reports == ((True, "f(1)"),) for outcome in outcomes)


def test_the_pool_is_whole_after_a_thousand_hostile_programs(pool: SandboxPool) -> None:
    assert is_whole(pool)
    before = set(pool.pids())
    quick = [attack for attack in ATTACKS if attack.name not in LASTING]
    with decoys(CONFIG) as names:
        attacks = (quick * (1 + 1000 // len(quick)))[:1000]
        outcomes = pool.run_all(attack_jobs(attacks, names))
    assert [name for pair in zip(attacks, outcomes, strict=True) if (name := fault(*pair))] == []
    assert set(pool.pids()) == before
    assert pool.num_replaced == 0
    assert is_whole(pool)


def test_a_hundred_endless_loops_leave_the_pool_at_full_size_and_the_next_score_right(pool: SandboxPool) -> None:
    assert is_whole(pool)
    before = set(pool.pids())
    outcomes = pool.run_all([CheckJob("while True: pass", "__report__(True)", time_limit_s=0.05)] * 100)
    assert {outcome.end for outcome in outcomes} == {"time"}
    assert not any(outcome.reports for outcome in outcomes)
    assert set(pool.pids()) == before
    assert is_whole(pool)


def test_outcomes_come_in_the_order_of_the_jobs(pool: SandboxPool) -> None:
    slow_first = [ProgramJob(f"import time\ntime.sleep({0.3 if n == 0 else 0})\nprint({n})") for n in range(8)]
    assert [outcome.runs[0].stdout for outcome in pool.run_all(slow_first)] == [f"{n}\n" for n in range(8)]
    assert pool.run_all([]) == []


def test_a_slot_whose_server_is_killed_is_replaced_and_its_job_done_elsewhere(pool: SandboxPool) -> None:
    assert is_whole(pool)
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    assert is_whole(pool)
    assert len(pool.pids()) == CONFIG.num_slots


def test_a_file_of_one_job_is_gone_for_the_next() -> None:
    with SandboxPool(SandboxConfig(num_slots=1), available()[-1]) as pool:
        pool.run(ProgramJob("open('left', 'w').write('x')"))
        assert pool.run(ProgramJob("import os\nprint(os.listdir('.'))")).runs[0].stdout == "[]\n"


@pytest.mark.parametrize("hung", [False, True])
def test_nothing_is_left_after_close(pool: SandboxPool, hung: bool) -> None:
    assert is_whole(pool)
    for pid in descendants() - {os.getpid()} if hung else ():
        os.kill(pid, signal.SIGSTOP)
    pool.close()
    pool.close()
    wait_until(
        lambda: not descendants() & set(pool.pids()) and len(descendants()) <= 1, 30, "no process below this one"
    )


def test_the_folder_of_a_server_that_hangs_is_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SandboxPool(CONFIG, available()[-1]) as pool:
        pool.run(ProgramJob("print(1)", time_limit_s=60.0))
        assert [path.name[:15] for path in tmp_path.iterdir()] == ["cohort-sandbox-"]
        for pid in pool.pids():
            os.kill(pid, signal.SIGSTOP)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer_is_replaced_and_its_job_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "GRACE_S", 1.0)
    with SandboxPool(SandboxConfig(num_slots=1), available()[-1]) as pool:
        assert is_whole(pool)
        os.kill(pool.pids()[0], signal.SIGSTOP)
        assert pool.run(ProgramJob("print(1)", time_limit_s=2.0)).complete
        assert pool.num_replaced == 1


def test_a_batch_that_was_broken_off_says_nothing_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lasting = ProgramJob("import time\ntime.sleep(0.5)\nprint('old')", time_limit_s=60.0)
    with SandboxPool(CONFIG, available()[-1]) as pool:
        assert is_whole(pool)
        with monkeypatch.context() as patched:
            patched.setattr(pool, "_go_on", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run_all([HONEST, lasting])
        assert [outcome.reports for outcome in pool.run_all([HONEST] * 2)] == [((True, "f(1)"),)] * 2


def test_output_is_cut_at_the_limit(pool: SandboxPool) -> None:
    outcome = pool.run(ProgramJob("print('x' * 1_000_000)", time_limit_s=60.0))
    assert (outcome.end, len(outcome.runs[0].stdout), outcome.runs[0].output_cut) == ("finished", 64 * 1024, True)


@pytest.mark.parametrize("tier", available())
def test_servers_end_when_their_owner_is_killed(tier: str, tmp_path: Path) -> None:
    code = f"""
import time
from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox import ProgramJob, SandboxPool
pool = SandboxPool(SandboxConfig(num_slots=2), {tier!r})
pool.run_all([ProgramJob("print(1)", time_limit_s=60.0)] * 2)
print(*pool.pids(), flush=True)
pool.run(ProgramJob("while True: pass", time_limit_s=60.0))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = {int(pid) for pid in owner.stdout.readline().split()}
        assert len(pids) == 2
        owner.kill()
    wait_until(
        lambda: not any(state not in "ZX" for pid, (_, state) in process_table().items() if pid in pids),
        30,
        "servers ended",
    )
