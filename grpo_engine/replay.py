"""`python -m grpo_engine replay`: stored rollouts scored again by another config's rewards.

Torch-free but for parts that need a model.

`replay DIR --config new.yaml --out FOLDER` reads an attempt's rollout files (or single ones), writes to FOLDER
replay.parquet (a row a completion) and summary.json, and prints the summary; {"problems": […]} with exit status 2 when
it cannot. The config is a run's, or only `rewards` with `reward_clip`, `sandbox` and `data`. What rewards print goes to
standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.config import RLStage, RunConfig, SandboxConfig
from grpo_engine.config_errors import load_config, problems_of, read_yaml
from grpo_engine.config_gates import learned_names
from grpo_engine.errors import InvalidConfig, Problem, RewardError
from grpo_engine.reward.composite import build_rewards
from grpo_engine.reward.replay import replay, rollout_files
from grpo_engine.reward.resources import RewardResources
from grpo_engine.score import ScoreConfig, learned_parts


def reward_stage(text: str, source: str, key: str | None = None) -> tuple[RLStage, SandboxConfig]:
    """The stage whose rewards a config's text names: the stage `key` (such as 1-rl) of a run config, else its only
    reinforcement-learning stage; or the stage that bare `rewards` make. Raises InvalidConfig."""
    data = read_yaml(text, source)
    if isinstance(data, Mapping) and "stages" not in data:
        try:
            given = ScoreConfig.model_validate(data)
            return given.stage(), given.sandbox
        except ValidationError as error:
            raise InvalidConfig(problems_of(error, data)) from error
    config = load_config(data, source)
    return _stage(config, key), config.sandbox


def _stage(config: RunConfig, key: str | None) -> RLStage:
    found = {f"{i}-{stage.kind}": stage for i, stage in enumerate(config.stages) if isinstance(stage, RLStage)}
    if key in found:
        return found[key]
    if len(found) == 1:
        return next(iter(found.values()))
    remedy = f"give one of its stages the name, or name only its rewards: {', '.join(found) or 'it has none'}"
    raise InvalidConfig([Problem("stages", str(key or ""), "which stage's rewards are meant is not clear", remedy)])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The summary; written beside the Parquet file too. Raises InvalidConfig, RewardError or OSError."""
    started = time.monotonic()
    signal.alarm(arguments.limit_s or 0)
    sources = dict(_source(pair) for pair in arguments.reward)
    key, paths = rollout_files(arguments.rollouts, arguments.stage, arguments.max_batches)
    stage, sandbox = reward_stage(arguments.config.read_text(encoding="utf-8"), str(arguments.config), key)
    arguments.out.mkdir(parents=True, exist_ok=True)
    resources = RewardResources(sources, sandbox, num_processes=arguments.processes)
    if learned_names(stage.rewards):
        resources.learned = learned_parts()
    with closing(build_rewards(stage, resources)) as rewards:
        summary = replay(paths, rewards, arguments.out / "replay.parquet")
        told = {"faults": [asdict(fault) for fault in rewards.take_faults()], "counts": rewards.take_counts()}
    summary = {"stage": key, **summary, **told, "seconds": round(time.monotonic() - started, 3)}
    (arguments.out / "summary.json").write_text(json.dumps(summary, ensure_ascii=False))
    return summary


def _source(pair: str) -> tuple[str, str]:
    name, _, file = pair.partition("=")
    if not file:
        raise InvalidConfig([Problem("", pair, "--reward needs NAME=FILE", "write --reward brevity=brevity.py")])
    return name, Path(file).read_text(encoding="utf-8")


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, nargs="+", help="an attempt's folder, its rollouts folder, or files")
    parser.add_argument("--config", type=Path, required=True, help="config with the other rewards, YAML or JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for replay.parquet and summary.json")
    parser.add_argument("--stage", help="stage whose rollouts are meant, such as 1-rl; the only one by default")
    parser.add_argument("--reward", action="append", default=[], metavar="NAME=FILE", help="source of a custom reward")
    parser.add_argument("--max-batches", type=_positive, help="score at most so many batches, evenly spread")
    parser.add_argument("--limit-s", type=_positive, help="end the process after so many seconds")
    parser.add_argument("--processes", type=_positive, help="scoring processes; one a core by default")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 scored, 2 refused."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = run(arguments)
        status = 0
    except InvalidConfig as error:
        answer, status = {"problems": [asdict(problem) for problem in error.problems]}, 2
    except (RewardError, OSError, UnicodeDecodeError) as error:
        answer, status = {"problems": [asdict(Problem("", "", str(error), "correct it and repeat"))]}, 2
    print(json.dumps(answer, ensure_ascii=False))
    return status
