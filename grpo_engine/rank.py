"""One rank of an attempt: parses its command line, obeys its parent, runs the engine."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path

from grpo_engine.config import RunConfig
from grpo_engine.control import Control


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="resolved config, JSON")
    parser.add_argument("--out", type=Path, required=True, help="the attempt's directory")
    add_checkpoint_arguments(parser)
    parser.add_argument("--reward", action="append", default=[], metavar="NAME=FILE", help="source of a custom reward")


def main(arguments: argparse.Namespace) -> int:
    control = Control.from_environment()  # before torch is imported: the parent may be gone already
    # OpenMP's threads spin while they wait; beside any other load that makes a step a hundred times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _prepare_log(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    config = RunConfig.model_validate(json.loads(arguments.config.read_text()))
    sources = {name: Path(file).read_text() for name, file in map(split_reward, arguments.reward)}
    from grpo_engine.communicator import join
    from grpo_engine.engine import run_attempt

    communicator = join(config.needs.device)
    status = run_attempt(
        config,
        arguments.out,
        resume=arguments.resume or arguments.fork,
        forked=arguments.fork is not None,
        custom_sources=sources,
        control=control,
        communicator=communicator,
    )
    communicator.leave(failed=status != 0)
    return status


def _prepare_log(rank: int, world_size: int) -> None:
    """All ranks append to one log. Since they go the same way, the others say only what rank 0 would not."""
    place = f"rank {rank} " if world_size > 1 else ""
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {place}%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request to a judge


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="continue this run from its checkpoint")
    either.add_argument(
        "--fork", type=Path, metavar="CHECKPOINT", help="go on from another run's checkpoint under this config"
    )


def split_reward(text: str) -> tuple[str, str]:
    """Example: split_reward("brevity=/tmp/brevity.py") == ("brevity", "/tmp/brevity.py")."""
    name, _, file = text.partition("=")
    if not file:
        raise SystemExit(f"--reward {text}: write NAME=FILE, such as --reward brevity=brevity.py")
    return name, file
