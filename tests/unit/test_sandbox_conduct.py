"""From what a server answered to what is said about a program."""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox import self_test
from grpo_engine.reward.sandbox.attack import REACHED, Attack
from grpo_engine.reward.sandbox.conduct import conduct, lost
from grpo_engine.reward.sandbox.forgeries import FORGERIES
from grpo_engine.reward.sandbox.jobs import CheckJob, Job, Outcome, ProgramJob, Run
from grpo_engine.reward.sandbox.self_test import SandboxRefused, choose_tier, fault, open_pool, passes
from grpo_engine.reward.sandbox.slot import Reply, Request, Stream
from workers.sandbox_check import read_report

CONFIG = SandboxConfig(cpu_limit_s=3, output_kib=1)
LOADED = {"load": "loaded", "error": ""}
DONE = {"end": "done", "memory": False}


def said(*messages: dict[str, Any]) -> bytes:
    lines = [json.dumps(message).encode() for message in messages]
    return b"".join(struct.pack("I", len(line)) + line for line in lines)


def outcome(job: Job, *replies: tuple[Reply, bytes]) -> Outcome:
    """Send the replies in, each with what came over the verdict stream, the last of the request."""
    steps = conduct(job, CONFIG)
    request: Request = next(steps)
    for reply, verdict in replies:
        request.streams[-1].add(verdict)
        try:
            request = steps.send(reply)
        except StopIteration as through:
            return through.value  # type: ignore[no-any-return]
    raise AssertionError("the job wants more replies")


def check(*messages: dict[str, Any], program: int = 0, cpu_s: float = 0.1, tests: int = 0, why: str = "") -> Outcome:
    ended = {"program": (program, cpu_s), "tests": (tests, 0.1)}
    return outcome(CheckJob("", "", 2.0), (Reply(why, ended=ended, wall_s=0.5), said(*messages)))


def test_tests_that_ran_to_their_end_are_complete_with_what_they_reported() -> None:
    told = check(LOADED, {"report": [True, "a"]}, {"report": [False, "b"]}, DONE)
    assert (told.end, told.complete, told.reports) == ("finished", True, ((True, "a"), (False, "b")))
    assert not passes(told)
    assert passes(check(LOADED, {"report": [True, "a"]}, DONE))


def test_no_report_at_all_is_no_pass() -> None:
    assert not passes(check(LOADED, DONE))


@pytest.mark.parametrize(
    ("messages", "status", "end"),
    [
        ([{"load": "compile_error", "error": "SyntaxError: x"}], 0, "compile_error"),
        ([{"load": "exception", "error": "KeyError: 1"}], 0, "exception"),
        ([LOADED, {"end": "gone"}], 0, "exited"),
        ([{"end": "gone"}], 3 << 8, "exited"),
        ([LOADED, {"end": "gone"}], signal.SIGSEGV, "crashed"),
        ([LOADED, {"end": "gone"}], signal.SIGXCPU, "time"),
        ([LOADED, {"end": "gone"}], signal.SIGKILL, "memory"),
        ([LOADED, {"end": "broken", "error": "E", "influenced": False, "memory": False}], 0, "tests_failed_to_run"),
        ([LOADED, {"end": "broken", "error": "E", "influenced": True, "memory": False}], 0, "exception"),
        ([LOADED, {"report": [False, ""]}, {"end": "done", "memory": True}], 0, "memory"),
    ],
)
def test_every_way_to_end_has_its_word(messages: list[dict[str, Any]], status: int, end: str) -> None:
    told = check(*messages, program=int(status))
    assert told.end == end
    assert not passes(told)
    assert told.error or end == "finished"


def test_a_program_that_used_up_its_cpu_time_is_told_from_one_that_was_killed() -> None:
    assert check(LOADED, {"end": "gone"}, program=signal.SIGKILL, cpu_s=3.0).end == "time"


def test_what_was_reported_before_the_wall_clock_is_kept_but_not_complete() -> None:
    told = check(LOADED, {"report": [True, "a"]}, why="time")
    assert (told.end, told.complete, told.reports, passes(told)) == ("time", False, ((True, "a"),), False)
    assert told.error == "not through after 2 s"


def test_tests_that_were_done_when_the_time_was_over_are_not_complete() -> None:
    told = check(LOADED, {"report": [True, "a"]}, DONE, why="time")
    assert (told.end, told.complete, passes(told)) == ("time", False, False)


def test_a_memory_error_that_the_tests_asked_for_is_no_failure() -> None:
    told = check(LOADED, {"report": [True, "a"]}, {"end": "done", "memory": True})
    assert (told.end, passes(told)) == ("finished", True)


def test_tests_whose_process_ended_itself_have_crashed() -> None:
    told = check(LOADED, {"report": [True, "a"]}, tests=3 << 8)
    assert (told.end, told.complete, told.error) == ("crashed", False, "the tests' process: exit status 3")


def test_the_last_errors_of_a_program_are_kept() -> None:
    steps = conduct(ProgramJob(""), CONFIG)
    next(steps).streams[1].add(b"x" * 20_000 + b"the end")
    with pytest.raises(StopIteration) as through:
        steps.send(Reply(ended={"program": (1 << 8, 0.1)}))
    assert through.value.value.runs[0].stderr[-8:] == "xthe end"


def test_tests_whose_own_process_died_are_not_complete() -> None:
    told = check(LOADED, {"report": [True, "a"]}, tests=signal.SIGSEGV)
    assert (told.end, told.complete, told.error) == ("crashed", False, "the tests' process: SIGSEGV")


def test_a_torn_message_ends_the_verdict() -> None:
    job = CheckJob("", "")
    torn = said(LOADED, {"report": [True, "a"]}) + said(DONE)[:-1]
    told = outcome(job, (Reply(ended={"program": (0, 0.1), "tests": (0, 0.1)}), torn))
    assert not told.complete


def test_runs_share_one_limit_and_stop_at_the_first_that_does_not_finish() -> None:
    job = ProgramJob("", ("1", "2", "3"), time_limit_s=2.0)
    steps = conduct(job, CONFIG)
    assert next(steps).time_limit_s == 2.0
    request = steps.send(Reply(ended={"program": (0, 0.1)}, wall_s=0.5))
    assert request.time_limit_s == 1.5
    with pytest.raises(StopIteration) as through:
        steps.send(Reply(ended={"program": (2 << 8, 0.1)}, wall_s=0.5))
    told = through.value.value
    assert [run.end for run in told.runs] == ["finished", "exited"]
    assert (told.end, told.error, told.complete, told.num_processes) == ("exited", "exit status 2", False, 2)


@pytest.mark.parametrize(("status", "ends"), [(2 << 8, ["exited", "finished"]), (int(signal.SIGXCPU), ["time"])])
def test_every_input_is_tried_while_there_is_time(status: int, ends: list[str]) -> None:
    failed, well = Reply(ended={"program": (status, 0.1)}), Reply(ended={"program": (0, 0.1)})
    told = outcome(ProgramJob("", ("1", "2"), every_input=True), (failed, b""), (well, b""))
    assert [run.end for run in told.runs] == ends
    assert (told.end, told.complete) == (ends[0], False)


def test_what_does_not_parse_is_not_run_for_every_input() -> None:
    reply = Reply(ended={"program": (1 << 8, 0.1)}), said({"end": "compile_error", "error": "SyntaxError"})
    told = outcome(ProgramJob("", ("1", "2"), every_input=True), reply)
    assert [run.end for run in told.runs] == ["compile_error"]


def test_what_the_sandbox_could_not_do_is_not_held_against_the_program() -> None:
    assert outcome(ProgramJob(""), (Reply(refused="cannot fork"), b"")).end == "refused"
    assert outcome(CheckJob("", ""), (Reply(refused="cannot fork"), b"")).end == "refused"
    assert lost("x").end == "crashed"


def test_the_beginning_or_the_end_of_a_stream_is_kept() -> None:
    head, tail = Stream(4), Stream(4, tail=True)
    for part in (b"abc", b"def", b"g"):
        head.add(part)
        tail.add(part)
    assert (bytes(head.data), head.cut, bytes(tail.data)) == (b"abcd", True, b"defg")
    whole = Stream(4)
    whole.add(b"abcd")
    assert not whole.cut


def test_an_attack_that_got_through_or_ended_otherwise_is_a_fault() -> None:
    attack, hanging = Attack("a", "pass"), Attack("b", "pass", ends=("time",))
    assert fault(attack, Outcome("finished", runs=(Run("finished", stdout=f"{REACHED}\n"),))) == "a"
    assert fault(attack, Outcome("crashed", runs=(Run("crashed"),))) == ""
    assert "ended by finished" in fault(hanging, Outcome("finished", runs=(Run("finished"),)))
    assert "not run" in fault(attack, Outcome("refused", "no fork"))


class Answering:
    """A pool that answers every program and every check in one way."""

    def __init__(self, program: Outcome, check: Outcome) -> None:
        self._program, self._check = program, check

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self._check if isinstance(job, CheckJob) else self._program for job in jobs]


WELL = Outcome("finished", complete=True, runs=(Run("finished", stdout="2\n"),))


@pytest.mark.parametrize(
    ("program", "check", "said"),
    [
        (WELL, Outcome("exited"), ""),
        (WELL, Outcome("finished", reports=((True, ""),), complete=True), ", ".join(f.name for f in FORGERIES[:4])),
        (Outcome("crashed", "SIGSYS"), Outcome("exited"), "an honest program did not run: crashed SIGSYS"),
        (replace(WELL, runs=(Run("finished"),)), Outcome("exited"), "an honest program did not run: finished "),
    ],
)
def test_a_tier_holds_where_honest_programs_run_and_no_forgery_passes(
    program: Outcome, check: Outcome, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SandboxPool", lambda config, tier: Answering(program, check))
    assert self_test.check_tier("landlock", 1, whole=False) == said


@pytest.mark.parametrize(
    ("wanted", "fails", "tier", "tried"),
    [
        ("auto", "", "bubblewrap", ["bubblewrap"]),
        ("auto", "bubblewrap", "landlock", ["bubblewrap", "landlock"]),
        ("landlock", "", "landlock", ["landlock"]),
        ("bubblewrap", "bubblewrap", "refused", ["bubblewrap"]),
    ],
)
def test_the_strongest_tier_that_holds_is_taken_and_a_named_one_alone_is_tried(
    wanted: str, fails: str, tier: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "obstacle", lambda tier: "")
    monkeypatch.setattr(self_test, "check_tier", lambda tier, slots, whole: "a fork" if tier == fails else "")
    report = choose_tier(SandboxConfig.model_validate({"tier": wanted}))
    assert report.tier == tier
    assert [name for name in report.details if name in ("bubblewrap", "landlock")] == tried


def test_a_host_that_cannot_confine_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_engine.reward.sandbox.self_test.obstacle", lambda tier: f"no {tier} here")
    assert choose_tier(SandboxConfig()).tier == "refused"
    with pytest.raises(SandboxRefused, match=r"bubblewrap: no bubblewrap here; landlock: .* sandbox.tier: unsafe"):
        open_pool(SandboxConfig())
    assert choose_tier(SandboxConfig(tier="unsafe")).tier == "unsafe"


def test_a_worker_whose_check_failed_says_why() -> None:
    assert read_report('{"tier": "landlock", "details": {"a": "b"}}', "") == {"tier": "landlock", "details": {"a": "b"}}
    assert read_report("", "x\nOSError: no") == {"tier": "unknown", "details": {"check": "OSError: no"}}
