"""`python -m grpo_engine run`: train with no web, broker or database. The folder it fills can be imported later."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from grpo_engine import events
from grpo_engine.config import RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.errors import InvalidConfig
from grpo_engine.failures import read_failure, remove_failures
from grpo_engine.launch import Ranks, start_ranks
from grpo_engine.rank import add_checkpoint_arguments, split_reward

POLL_S = 0.2
STOP_GRACE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a run config, YAML")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill: journal, log, rollouts, checkpoints")
    add_checkpoint_arguments(parser)
    parser.add_argument("--reward", action="append", default=[], metavar="NAME=FILE", help="source of a custom reward")
    parser.add_argument("--seed", type=int, help="overrides the config's seed")


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 finished or stopped on request, 2 config refused, 1 failed."""
    out: Path = arguments.out
    try:
        config = _read_config(arguments)
        if (out / events.JOURNAL_NAME).exists():
            print(f"--out {out}: already holds a run; choose a new folder, or continue with --resume", file=sys.stderr)
            return 2
        command = rank_command(config, out, arguments)
    except (InvalidConfig, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both ask for a checkpoint first
    ranks = start_ranks(command, num_ranks=config.needs.num_ranks, log_path=out / "engine.log")
    return _follow(ranks, out)


def rank_command(config: RunConfig, out: Path, arguments: argparse.Namespace) -> list[str]:
    """Write the resolved config into `out` and return the command of its ranks. OSError names a missing reward file."""
    for reward in arguments.reward:
        Path(split_reward(reward)[1]).read_text()
    out.mkdir(parents=True, exist_ok=True)
    remove_failures(out)
    path = out / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False))
    command = [sys.executable, "-m", "grpo_engine", "rank", "--config", str(path), "--out", str(out)]
    for option in ("resume", "fork"):
        if (checkpoint := getattr(arguments, option)) is not None:
            command += [f"--{option}", str(checkpoint)]
    for reward in arguments.reward:
        command += ["--reward", reward]
    return command


def _read_config(arguments: argparse.Namespace) -> RunConfig:
    config = load_config(arguments.config.read_text(), source=str(arguments.config))
    if arguments.seed is None:
        return config
    return load_config({**config.model_dump(mode="json"), "seed": arguments.seed}, source="--seed")


def _follow(ranks: Ranks, out: Path) -> int:
    """Print what the journal says until the ranks end; Ctrl-C or SIGTERM stops them with a checkpoint."""
    story = _Story(out)
    try:
        while True:
            status = ranks.poll()
            story.go_on()
            if status is not None:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print("stopping; the engine writes a checkpoint first", flush=True)
        status = ranks.stop(STOP_GRACE_S)
    if status:
        story.end_badly(status)
    return status


class _Story:
    """Prints what an attempt's folder tells."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset = 0
        self._failure_told = False

    def go_on(self) -> None:
        for event, position in events.read_from(self._folder / events.JOURNAL_NAME, self._offset):
            self._offset = position
            self._failure_told |= isinstance(event, events.Failed)
            if line := describe(event):
                print(line, flush=True)

    def end_badly(self, status: int) -> None:
        failure = read_failure(self._folder)
        if failure is not None and not self._failure_told:  # rank 0 could not journal it any more
            print(f"failed ({failure.reason}): {failure.message}", flush=True)
        print(f"the engine ended with status {status}; its log is {self._folder / 'engine.log'}", file=sys.stderr)


def describe(event: events.AnyEvent) -> str | None:
    """One line for people, None for events that would only be noise."""
    match event:
        case events.StageStarted():
            return f"{event.stage}: from step {event.step} to {event.num_steps}"
        case events.Metrics() if event.step % 10 == 0:
            shown = ("loss", "reward/mean", "completion/mean_length_tokens", "time/step_s")
            values = [f"{name} {event.values[name]:.4g}" for name in shown if event.values.get(name) is not None]
            return f"{event.stage} step {event.step}  " + "  ".join(values)
        case events.Evaluation():
            values = [f"{name} {value:.3f}" for name, value in event.metrics.items()]
            return f"{event.stage} step {event.step}  {event.benchmark}: " + "  ".join(values)
        case events.CheckpointSaved():
            return f"{event.stage} step {event.step}  checkpoint {event.path} ({event.bytes / 1e6:.1f} MB)"
        case events.Finding():
            return f"{event.stage} step {event.step}  finding: {event.title} — {event.remedy}"
        case events.Finished():
            return f"finished ({event.reason})"
        case events.Stopped():
            return event.message
        case events.Failed():
            return f"failed ({event.reason}): {event.message}"
        case _:
            return None
