"""Where programs that a model wrote are run: limits first, then the program. Torch-free.

`open_pool` gives a `SandboxPool` in the strongest tier that this host holds; `jobs.py` says what a job and its outcome
are; `tiers.py` how a host can confine; `inside/` is what runs there, on the standard library alone; `attacks.py` and
`forgeries.py` are what it has to hold against, and `self_test.py` tries them.
"""

from grpo_engine.reward.sandbox.jobs import CheckJob, Job, Outcome, ProgramJob, Run, TierReport
from grpo_engine.reward.sandbox.pool import SandboxPool
from grpo_engine.reward.sandbox.self_test import SandboxRefused, choose_tier, open_pool

__all__ = [
    "CheckJob",
    "Job",
    "Outcome",
    "ProgramJob",
    "Run",
    "SandboxPool",
    "SandboxRefused",
    "TierReport",
    "choose_tier",
    "open_pool",
]
