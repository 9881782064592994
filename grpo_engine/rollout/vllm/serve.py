"""What a vLLM server's process runs: `python -m grpo_engine.rollout.vllm.serve FLAGS`, the flags those of `vllm serve`.

It is vLLM's own API server, with four things more: server and engine process die with whoever started them, vLLM's
faults on the CPU are mended (`cpu_fixes`), tokens that nobody waits for go from engine to server together
(`held_outputs`), and are decoded only for whoever reads them (`token_names`). Started by hand (no COHORT_PARENT_PID) it
runs until it is stopped; docs/rollout.md tells the flags that a server needs for `rollout.addresses`.
"""

from __future__ import annotations

import os

from grpo_engine.control import PARENT_PID
from grpo_engine.lifeline import die_with_parent
from grpo_engine.rollout.vllm.held_outputs import hold_outputs
from grpo_engine.rollout.vllm.token_names import name_tokens_late


def main() -> None:
    """Serve until SIGTERM. Raises SystemExit when the parent has already gone, or for wrong flags."""
    _follow_parent()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    name_tokens_late()
    serve()


def _follow_parent() -> None:
    """Before anything slow is imported. The children of this process will import this module once more."""
    parent = os.environ.get(PARENT_PID)
    if parent is not None:
        die_with_parent(int(parent))
    os.environ[PARENT_PID] = str(os.getpid())


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that vLLM's API server, or its engine, started
    _follow_parent()
    hold_outputs()
    name_tokens_late()
