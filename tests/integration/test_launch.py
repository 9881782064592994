"""Starting ranks, watching them, and leaving none behind: with small Python programs as ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_engine.launch import Ranks, start_ranks
from tests.waiting import wait_until

Start = Callable[..., Ranks]
READY = "from grpo_engine.control import Control; c = Control.from_environment(); print('ready', flush=True);"
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def run(code: str, num_ranks: int = 1, **options: object) -> Ranks:
        argv = [sys.executable, "-c", code]
        return start_ranks(argv, num_ranks=num_ranks, log_path=tmp_path / "log", **options)  # type: ignore[arg-type]

    return run


def log_has(folder: Path, text: str, times: int = 1) -> Callable[[], bool]:
    return lambda: (folder / "log").read_text().count(text) >= times


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def ended(ranks: Ranks) -> int:
    wait_until(lambda: ranks.poll() is not None, 20, "all ranks ended")
    code = ranks.poll()
    assert code is not None
    return code


def test_each_rank_learns_its_place(start: Start, tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COHORT_PARENT_PID", "EXTRA"]
    code = f"import os, json; print(json.dumps([os.environ[n] for n in {names!r}]), os.getpid() == os.getsid(0))"

    assert ended(start(code, 2, env={"EXTRA": "x"})) == 0

    lines = sorted((tmp_path / "log").read_text().splitlines())
    port = json.loads(lines[0].rsplit(" ", 1)[0])[4]
    place = [[str(rank), str(rank), "2", "127.0.0.1", port, str(os.getpid()), "x"] for rank in range(2)]
    assert lines == [f"{json.dumps(values)} True" for values in place]


def test_output_is_appended_to_the_log(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")

    assert ended(start("import sys; print('out'); print('err', file=sys.stderr)")) == 0
    assert (tmp_path / "log").read_text() == "before\nout\nerr\n"


def test_a_failing_rank_ends_the_others_and_tells_its_status(start: Start) -> None:
    code = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(60)"
    ranks = start(code, 2, failure_grace_s=0.1)

    assert ended(ranks) == 3
    assert ranks.failed_rank == 1
    assert not any(map(alive, ranks.pids))


def test_rank_0_may_journal_another_ranks_failure_before_it_ends(start: Start, tmp_path: Path) -> None:
    waits = f"while {'failed'!r} not in open({str(tmp_path / 'log')!r}).read(): time.sleep(0.01)"
    fails = "os.environ['RANK'] == '1' and (print('failed', flush=True), os._exit(3))"
    ranks = start(f"import os, time; {fails}\n{waits}\ntime.sleep(0.3); print('journaled', flush=True); os._exit(1)", 2)

    assert ended(ranks) == 3
    assert ranks.failed_rank == 1
    assert log_has(tmp_path, "journaled")()


def test_the_wait_for_rank_0_blocks_no_poll(start: Start) -> None:
    ranks = start("import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(60)", 3)
    wait_until(lambda: ranks.poll() is None and ranks.failed_rank == 1, 20, "rank 1 failed")

    assert ranks.poll() is None
    assert alive(ranks.pids[0])
    ranks.kill()
    assert (ranks.poll(), ranks.failed_rank) == (3, 1)


SIMULTANEOUS = [((1, 3), 1, 3), ((-9, 1), 0, -9), ((1, -9), 1, -9), ((2, 0), 0, 2)]


@pytest.mark.parametrize(("statuses", "first", "code"), SIMULTANEOUS)
def test_of_failures_seen_at_once_the_likelier_cause_is_told(
    start: Start, statuses: tuple[int, int], first: int, code: int
) -> None:
    how = "os.kill(os.getpid(), -status) if status < 0 else os._exit(status)"
    ranks = start(f"import os; status = {statuses}[int(os.environ['RANK'])]; {how}", 2)
    for pid in ranks.pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    assert (ranks.poll(), ranks.failed_rank) == (code, first)


def test_rank_0_inherits_the_port_where_the_ranks_meet(start: Start, tmp_path: Path) -> None:
    code = """
import os, socket
if os.environ["RANK"] == "0":
    meeting = socket.socket(fileno=int(os.environ["COHORT_RENDEZVOUS_FD"]))
    print("port", meeting.getsockname()[1] == int(os.environ["MASTER_PORT"]))
    meeting.accept()[0].sendall(b"welcome")
else:
    assert "COHORT_RENDEZVOUS_FD" not in os.environ
    print(socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).recv(7))
"""
    assert ended(start(code, 2)) == 0
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["b'welcome'", "port True"]


def test_a_killed_rank_is_told_by_its_signal(start: Start) -> None:
    ranks = start(SLEEP, 2)
    os.kill(ranks.pids[0], signal.SIGKILL)

    assert ended(ranks) == -signal.SIGKILL
    assert not any(map(alive, ranks.pids))


def test_messages_reach_every_rank(start: Start, tmp_path: Path) -> None:
    ranks = start(READY + "import time\nwhile not c.messages(): time.sleep(0.01)\nprint(c.messages(), flush=True)", 2)
    ranks.send({"early_stopping": "stop"})

    assert ended(ranks) == 0
    assert (tmp_path / "log").read_text().count("[{'early_stopping': 'stop'}]") == 2


def test_a_rank_that_never_reads_does_not_block_the_sender(start: Start) -> None:
    ranks = start(SLEEP)
    for _ in range(3000):
        ranks.send({"deadline_boot_s": 1.0, "padding": "x" * 60})

    assert ranks.poll() is None
    ranks.stop(0)


def test_stop_lets_a_rank_end_by_itself(start: Start, tmp_path: Path) -> None:
    ranks = start(READY + "import time\nwhile not c.stop_requested: time.sleep(0.01)\nprint('saved')")
    wait_until(log_has(tmp_path, "ready"), 20, "the rank is ready")

    assert ranks.stop(20) == 0
    assert log_has(tmp_path, "saved")()


def test_stop_kills_what_ignores_it(start: Start, tmp_path: Path) -> None:
    ranks = start(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}")
    wait_until(log_has(tmp_path, "ready"), 20, "the rank is ready")

    assert ranks.stop(0.1) == -signal.SIGKILL


CHILD = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"


def test_no_descendant_is_left_even_in_a_session_of_its_own(start: Start, tmp_path: Path) -> None:
    ranks = start(f"{CHILD} print('child', p.pid, flush=True); import os; os._exit(0)")

    assert ended(ranks) == 0
    child = int((tmp_path / "log").read_text().split()[1])
    assert not Path(f"/proc/{child}").exists()


def test_other_children_of_the_parent_are_left_alone(start: Start) -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        start(SLEEP).stop(0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_passed_descriptors_live_as_long_as_the_rank(start: Start) -> None:
    reading, writing = os.pipe()
    ranks = start(SLEEP, pass_fds=[writing])
    os.close(writing)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)

    ranks.stop(0)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", f"""
import pathlib, sys, time
from grpo_engine.launch import start_ranks
ranks = start_ranks([sys.executable, "-c", {READY + SLEEP!r}], num_ranks=2, log_path=pathlib.Path("log"))
pathlib.Path("pids").write_text(" ".join(map(str, ranks.pids)))
time.sleep(60)"""], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
    wait_until(lambda: (tmp_path / "log").exists() and log_has(tmp_path, "ready", 2)(), 20, "both ranks are ready")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids))

    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(alive, pids)), 5, "both ranks died with their parent")


def test_a_rank_whose_parent_has_gone_does_not_start() -> None:
    environment = os.environ | {"COHORT_PARENT_PID": "1"}
    result = subprocess.run([sys.executable, "-c", READY], env=environment, capture_output=True, text=True)

    assert result.returncode == 1
    assert "the parent process 1 has gone" in result.stderr


def test_a_program_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_ranks(["/does/not/exist"], num_ranks=2, log_path=tmp_path / "log")


def test_only_the_main_thread_may_start_ranks(start: Start) -> None:
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            start("pass")
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
