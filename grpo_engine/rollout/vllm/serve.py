"""What a vLLM server's process runs: `python -m grpo_engine.rollout.vllm.serve FLAGS`, the flags those of `vllm serve`.

It is vLLM's own API server, with two things more: server and engine process die with whoever started them, and
vLLM's faults on the CPU are mended (`cpu_fixes`). Started by hand (no COHORT_PARENT_PID) it runs until it is stopped;
docs/rollout.md tells the flags that a server needs for `rollout.addresses`.
"""

from __future__ import annotations

import os

from grpo_engine.control import PARENT_PID, die_with_parent


def main() -> None:
    """Serve until SIGTERM. Raises SystemExit when the parent has already gone, or for wrong flags."""
    _follow_parent()
    os.environ[PARENT_PID] = str(os.getpid())  # for the engine process, which imports this module once more
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.entrypoints.openai.api_server import cli_env_setup, run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser(description=__doc__)).parse_args()
    validate_parsed_serve_args(arguments)
    import uvloop

    uvloop.run(run_server(arguments))


def _follow_parent() -> None:
    """Before anything slow is imported."""
    parent = os.environ.get(PARENT_PID)
    if parent is not None:
        die_with_parent(int(parent))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # vLLM's engine process, whose parent is the API server
    _follow_parent()
