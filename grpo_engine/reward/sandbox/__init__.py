"""Where programs that a model wrote are run: limits first, then the program. Torch-free.

`SandboxPool` runs jobs; `jobs.py` says what a job and its outcome are; `tiers.py` how strongly a host can confine;
`server.py` and what it imports run inside, on the standard library alone.
"""

from grpo_engine.reward.sandbox.jobs import CheckJob, Job, Outcome, ProgramJob, Run, TierReport
from grpo_engine.reward.sandbox.pool import SandboxPool

__all__ = ["CheckJob", "Job", "Outcome", "ProgramJob", "Run", "SandboxPool", "TierReport"]
