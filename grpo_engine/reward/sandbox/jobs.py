"""What is asked of the sandbox and what it answers. Torch-free, plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

JobStatus = Literal["ran", "compile_error", "load_error", "time", "memory", "crash", "unavailable"]
"""ran: every case has its own result. compile_error, load_error: the program does not parse, or raised while its top
level ran. time, memory, crash: it was ended by the wall clock or CPU limit, ran out of memory, or died (signal, exit)
before the cases were through; cases that passed before are kept. unavailable: the sandbox itself failed, nothing is
said about the program (abstain)."""

CaseStatus = Literal["passed", "failed", "error", "time", "memory", "crash", "not_run"]
"""passed; failed: an assertion of the tests did not hold (a wrong answer); error: an exception came out of the case;
time, memory, crash: as of the job, in this case; not_run: the job ended before it."""


@dataclass(frozen=True, slots=True)
class TestJob:
    """Tests against a program. The program runs in one process, the tests in another that holds proxies.

    Example: TestJob("def add(a, b): return a + b", names=("add",), cases=("assert add(1, 2) == 3",))
    HumanEval: TestJob(program, names=(entry_point,), setup=prompt_helpers + test, cases=(f"check({entry_point})",))
    """

    program: str
    """Python source, run as `__main__` is not: `__name__` is "candidate"."""
    cases: tuple[str, ...]
    """Sources, run in order in one namespace of the tests' process; each passes unless it raises."""
    names: tuple[str, ...]
    """What the tests may use of the program, by top-level name: functions, classes, exceptions, constants. Names of
    builtins and of standard modules are refused (a program must not replace `abs` or `math` under the tests). Helpers
    that belong to the task, not to the answer, go into `setup`."""
    setup: str = ""
    """Source that runs in the tests' process before the cases; what it defines goes before `names`."""
    time_limit_s: float = 5.0
    """Wall-clock seconds for program and all cases together."""

    __test__ = False  # not a class of tests for pytest


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A program run once for each standard input, as `__main__`; the caller compares the outputs.

    Example: ScriptJob("print(sum(map(int, input().split())))", stdins=("1 2",))
    """

    program: str
    stdins: tuple[str, ...]
    """One run each, in order; after a run that hit the time limit no other starts."""
    time_limit_s: float = 5.0
    """Wall-clock seconds for all runs together."""


Job = TestJob | ScriptJob


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case. A script's run that ended by itself with status 0 is `passed`: it ran."""

    status: CaseStatus
    message: str = ""
    """The exception or signal in words, at most 500 characters."""
    output: str = ""
    """ScriptJob: what the run wrote to standard output, cut at the limit."""
    output_cut: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the sandbox says about one job."""

    status: JobStatus
    cases: tuple[CaseResult, ...] = ()
    """One for each case or standard input, always all of them."""
    message: str = ""
    """Why the status is not `ran`, in words, at most 500 characters."""
    output: str = ""
    """What the program printed (standard output and error together), cut at the limit; of a script its errors."""
    wall_s: float = 0.0
    num_processes: int = 0
    """Sandboxed processes started for it."""

    @property
    def num_passed(self) -> int:
        return sum(case.status == "passed" for case in self.cases)


@dataclass(frozen=True, slots=True)
class TierReport:
    """What the self-test found out about this host."""

    tier: Literal["bubblewrap", "landlock", "unsafe", "refused"]
    """The strongest whose every check passed; refused: none, and `unsafe` was not asked for."""
    details: dict[str, str] = field(default_factory=dict)
    """For each tier that was tried: "passed", or what let it down; also `landlock_abi`, `bubblewrap` (version)."""
