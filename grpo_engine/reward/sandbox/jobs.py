"""What is asked of the sandbox and what it answers. Torch-free, plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

End = Literal[
    "finished", "compile_error", "exception", "exited", "time", "memory", "crashed", "refused", "tests_failed_to_run"
]  # fmt: skip
"""How a program ended.

finished: it ran to its end (a CheckJob: its tests ran to theirs while it lived; a run of a ProgramJob: exit status 0).
compile_error: it does not parse. exception: its top level raised. exited: it ended itself early (a CheckJob: any exit
before the tests were through; a run: a status other than 0 without a traceback). time: wall clock or CPU limit. memory:
MemoryError, or killed for memory. crashed: a signal, such as SIGSEGV, or more files than it may write. refused: the
sandbox itself failed; nothing is said about the program, so abstain. tests_failed_to_run: the tests' source does not
parse, or raised outside the program's fault: a dataset error, so abstain."""


@dataclass(frozen=True, slots=True)
class CheckJob:
    """Tests against a program: the program runs in one process, the tests in another that holds proxies of it.

    Example: CheckJob("def f(x): return x + 1", 'f = __program__("f")\\n__report__(f(1) == 2, "f(1) == 2")')

    The tests' source runs as `__tests__` and finds two names. `__program__(name)` is a proxy of the program's global
    `name` (also dotted, "Solution.f"): a function or class to call, or a plain value; NameError when the program does
    not define it. `__report__(passed, text)` is one case's verdict; only the tests' process can give it.
    """

    program: str
    """Python source. Its `__name__` is "program", so that a main guard does not run."""
    tests: str
    """Python source that the program's process never sees."""
    time_limit_s: float = 5.0
    """Wall-clock seconds for both together."""


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """A program run once for each standard input, as `__main__`, in a fresh process each, in order.

    Example: ProgramJob("print(sum(map(int, input().split())))", stdins=("1 2", "3 4"))
    """

    program: str
    stdins: tuple[str, ...] = ("",)
    time_limit_s: float = 5.0
    """Wall-clock seconds for all runs together."""
    every_input: bool = False
    """Run it for the other inputs too when it failed on one, as long as there is time; else the first failure ends the
    job."""


Job = CheckJob | ProgramJob


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a ProgramJob."""

    end: End
    error: str = ""
    """One line for a person: "ZeroDivisionError: division by zero (line 4)", "SIGSEGV", "exit status 3"."""
    stdout: str = ""
    """UTF-8 with errors replaced, NUL kept, cut at `output_kib`."""
    stderr: str = ""
    """The last 4,000 characters."""
    output_cut: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the sandbox says about one job."""

    end: End
    """Of a ProgramJob: that of the first run that did not finish."""
    error: str = ""
    """One line for a person, at most 300 characters; empty when finished."""
    reports: tuple[tuple[bool, str], ...] = ()
    """CheckJob: what the tests said by `__report__`, at most 10,000 of 300 characters; also what came before a kill."""
    complete: bool = False
    """CheckJob: the tests ran to their last statement and the program was alive then. ProgramJob: every run finished.
    Without it the reports are not all there are: what is missing has not passed."""
    runs: tuple[Run, ...] = ()
    """ProgramJob: the runs that started, in the order of the inputs."""
    stdout: str = ""
    """CheckJob: what the program printed, output and error together, cut at `output_kib`. No channel of the verdict."""
    output_cut: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_processes: int = 0
    """Sandboxed processes that were started for it."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """What the self-test found out about this host."""

    tier: Literal["bubblewrap", "landlock", "unsafe", "refused"]
    """The strongest of which every check passed; refused: none, and `unsafe` was not asked for."""
    details: dict[str, str] = field(default_factory=dict)
    """For each tier that was tried: "passed", or what let it down; also `landlock_abi` and `bubblewrap_version`."""
