"""From a job to what a server is asked, and from what came back to the outcome."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Generator
from typing import Any

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.jobs import CheckJob, End, Job, Outcome, ProgramJob, Run
from grpo_engine.reward.sandbox.slot import Reply, Request, Stream

Conduct = Generator[Request, Reply, Outcome]

_VERDICT_BYTES = 48 << 20
_ERRORS_BYTES = 16_000
_TAIL = 4000
_MAX_ERROR = 300
_ENDS: dict[str, End] = {
    "compile_error": "compile_error", "exception": "exception", "exited": "exited", "memory": "memory",
}  # fmt: skip

_HOPELESS: tuple[End, ...] = ("time", "compile_error")
"""After such a run no other can do better."""


def conduct(job: Job, config: SandboxConfig) -> Conduct:
    """Requests of one job, one after another; the reply to each is sent in, the outcome is what it returns."""
    return _check(job, config) if isinstance(job, CheckJob) else _program(job, config)


def refused(message: str) -> Outcome:
    """The sandbox failed; the program is not judged."""
    return Outcome("refused", message[:_MAX_ERROR])


def lost(message: str) -> Outcome:
    """The server ended again and again under this job alone, so it counts against the program."""
    return Outcome("crashed", f"the sandbox's server ended with it: {message}"[:_MAX_ERROR])


def _check(job: CheckJob, config: SandboxConfig) -> Conduct:
    output, verdict = Stream(config.output_kib * 1024), Stream(_VERDICT_BYTES)
    files = [_source(job.program), _source(job.tests)]
    reply = yield Request(_header("check", config), files, [output, verdict], job.time_limit_s)
    if reply.refused:
        return refused(reply.refused)
    messages = _messages(bytes(verdict.data))
    reports = tuple((bool(m["report"][0]), str(m["report"][1])) for m in messages if "report" in m)
    end, error = _check_end(reply, messages, config, job)
    if end == "finished" and not all(passed for passed, _ in reports) and messages[-1].get("memory"):
        end, error = "memory", "MemoryError"
    return Outcome(
        end,
        error[:_MAX_ERROR],
        reports,
        complete=any(message.get("end") == "done" for message in messages) and not reply.why,
        stdout=_text(output.data),
        output_cut=output.cut,
        wall_s=reply.wall_s,
        cpu_s=_cpu_s(reply),
        num_processes=2,
    )


def _check_end(reply: Reply, messages: list[dict[str, Any]], config: SandboxConfig, job: CheckJob) -> tuple[End, str]:
    if reply.why:
        return _ended_by_server(reply.why, config, job.time_limit_s)
    load = next((message for message in messages if "load" in message), {"load": "", "error": ""})
    if load["load"] in _ENDS:
        return _ENDS[load["load"]], load["error"]
    last = messages[-1].get("end") if messages else None
    if last == "done":
        return "finished", ""
    if last == "broken":
        error = messages[-1]["error"]
        if not messages[-1]["influenced"]:
            return "tests_failed_to_run", error
        return ("memory" if messages[-1]["memory"] else "exception"), f"the tests broke on what it returned: {error}"
    if last == "gone":
        end, error = _by_status(*reply.ended["program"], config)
        return end, error + (" before its tests were through" if end == "exited" else "")
    end, error = _by_status(*reply.ended["tests"], config)
    return ("crashed" if end == "exited" else end), f"the tests' process: {error}"


def _program(job: ProgramJob, config: SandboxConfig) -> Conduct:
    runs: list[Run] = []
    left_s, cpu_s = job.time_limit_s, 0.0
    source = _source(job.program)
    for given in job.stdins:
        out, errors, verdict = Stream(config.output_kib * 1024), Stream(_ERRORS_BYTES, tail=True), Stream(1 << 16)
        files = [source, given.encode("utf-8", "surrogatepass")]
        reply = yield Request(_header("program", config), files, [out, errors, verdict], max(0.001, left_s))
        if reply.refused:
            return refused(reply.refused)
        end, error = _run_end(reply, _messages(bytes(verdict.data)), config, job)
        runs.append(Run(end, error[:_MAX_ERROR], _text(out.data), _text(errors.data)[-_TAIL:], out.cut))
        left_s -= reply.wall_s
        cpu_s += _cpu_s(reply)
        if end in _HOPELESS or (end != "finished" and not job.every_input):
            break
    failed = next((run for run in runs if run.end != "finished"), None)
    ended: tuple[End, str] = (failed.end, failed.error) if failed else ("finished", "")
    wall_s = job.time_limit_s - left_s
    return Outcome(
        *ended, complete=failed is None, runs=tuple(runs), wall_s=wall_s, cpu_s=cpu_s, num_processes=len(runs)
    )


def _run_end(reply: Reply, messages: list[dict[str, Any]], config: SandboxConfig, job: ProgramJob) -> tuple[End, str]:
    if reply.why:
        return _ended_by_server(reply.why, config, job.time_limit_s)
    for message in messages:
        if message.get("end") in _ENDS:
            return _ENDS[message["end"]], str(message.get("error", ""))
    status, cpu_s = reply.ended["program"]
    return ("finished", "") if status == 0 else _by_status(status, cpu_s, config)


def _ended_by_server(why: str, config: SandboxConfig, limit_s: float) -> tuple[End, str]:
    if why == "files":
        return "crashed", f"its files outgrew {config.file_mib} MiB"
    return "time", f"not through after {limit_s:g} s"


def _by_status(status: int, cpu_s: float, config: SandboxConfig) -> tuple[End, str]:
    if os.WIFEXITED(status):
        return "exited", f"exit status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= config.cpu_limit_s):
        return "time", f"used its {config.cpu_limit_s} s of CPU time"
    if number == signal.SIGKILL:
        return "memory", "killed from outside, as the kernel does when memory runs out"
    return "crashed", signal.Signals(number).name


def _header(kind: str, config: SandboxConfig) -> dict[str, object]:
    return {
        "kind": kind,
        "cpu_s": config.cpu_limit_s,
        "memory_bytes": config.memory_mib << 20,
        "file_bytes": config.file_mib << 20,
        "folder_bytes": config.file_mib << 20,
        "max_processes": config.max_processes,
    }


def _source(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")


def _cpu_s(reply: Reply) -> float:
    return sum(cpu_s for _, cpu_s in reply.ended.values())


def _messages(data: bytes) -> list[dict[str, Any]]:
    """The whole messages of a verdict pipe; a torn last one is left out."""
    messages, at = [], 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("I", data, at)
        if at + 4 + length > len(data):
            break
        try:
            message = json.loads(data[at + 4 : at + 4 + length])
        except (ValueError, RecursionError):
            break
        if isinstance(message, dict):
            messages.append(message)
        at += 4 + length
    return messages
