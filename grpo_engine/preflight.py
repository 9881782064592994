"""Check a config before it runs: model folder, data, rewards, memory; no torch, no transformers, nothing trained.

`python -m grpo_engine preflight CONFIG [--reward NAME=FILE] [--json]` ends with 0 when the run can start, 2 when not.
Users' reward code is loaded and called, in processes of its own: whoever starts it sets the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from grpo_engine.checks.memory import estimate
from grpo_engine.checks.model_folder import ModelShape, inspect_model
from grpo_engine.checks.prompts import ReadStage, check_data
from grpo_engine.checks.report import Report
from grpo_engine.checks.reward_needs import check_sandbox
from grpo_engine.checks.rewards import check_rewards
from grpo_engine.checks.rollout import check_rollout
from grpo_engine.checks.tokenizer import LightTokenizer, stand_in_tokenizer
from grpo_engine.checks.training import check_training
from grpo_engine.config import RLStage, RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.errors import InvalidConfig, Problem

_NVIDIA = Path("/proc/driver/nvidia/version")


def check(config: RunConfig, custom_sources: Mapping[str, str], uncalled: Collection[str] = ()) -> Report:
    """Everything found, not only the first problem.

    `custom_sources`: source text of custom rewards by name. `uncalled`: names that are registered, but not to be called
    for this user; they cause a warning instead of a problem."""
    started, report = time.monotonic(), Report()
    _check_needs(config, report)
    shape, tokenizer = inspect_model(config.model, report)
    stages: list[ReadStage | None] = []
    for index, stage in enumerate(config.stages):
        read = _check_data(config, index, tokenizer, shape, report)
        stages.append(read)
        if isinstance(stage, RLStage):
            check_training(config, index, stage, report)
            check_rewards(stage, index, read, tokenizer, custom_sources, uncalled, report)
    check_sandbox(config, report)
    check_rollout(config, shape, report)
    if shape:
        _check_memory(config, shape, stages, report)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _check_data(
    config: RunConfig, index: int, tokenizer: LightTokenizer | None, shape: ModelShape | None, report: Report
) -> ReadStage | None:
    if tokenizer:
        return check_data(config, index, tokenizer, shape, report)
    unread = Report()  # without the model's tokenizer only the data's own problems can be told
    check_data(config, index, stand_in_tokenizer(), None, unread)
    report.problems += unread.problems
    return None


def _check_needs(config: RunConfig, report: Report) -> None:
    if config.needs.device == "cuda" and not _NVIDIA.exists():
        message = "this machine has no NVIDIA driver"
        report.warn("needs.device", "cuda", message, "start a worker on a machine with a GPU, or set it to cpu")


def _check_memory(config: RunConfig, shape: ModelShape, stages: list[ReadStage | None], report: Report) -> None:
    row_tokens = [read.row_tokens if read else min(shape.max_context_tokens, 4096) for read in stages]
    report.memory = estimate(config, shape, row_tokens)
    total, available = report.memory["total_bytes"], report.memory["available_bytes"]
    if config.needs.device == "cpu" and total > available:
        message = f"the run needs about {total / 1e9:.1f} GB, and this machine has {available / 1e9:.1f} GB free"
        report.warn("model", config.model.source, message, _memory_remedy(config))


def _memory_remedy(config: RunConfig) -> str:
    ranks = "lower needs.num_ranks, " if config.needs.num_ranks > 1 else ""
    return f"{ranks}lower memory.max_micro_batch_tokens, set memory.gradient_checkpointing, or use a smaller model"


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m grpo_engine preflight`."""
    parser.add_argument("config", type=Path, help="a run config, YAML or JSON")
    parser.add_argument("--reward", action="append", default=[], metavar="NAME=FILE", help="source of a custom reward")
    parser.add_argument(
        "--uncalled", action="append", default=[], metavar="NAME", help="registered, but not to be called"
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def main(args: argparse.Namespace) -> int:
    """Exit code: 0 no problem, 2 problems (or a config or file that cannot be read)."""
    with contextlib.redirect_stdout(sys.stderr):  # a reward's own prints must not end up in the report
        report = _report(args)
    if args.json:
        print(report.model_dump_json())
    else:
        print(_text(report))
    return 2 if report.problems else 0


def _report(args: argparse.Namespace) -> Report:
    try:
        config = load_config(args.config.read_text(encoding="utf-8"), str(args.config))
        sources = dict(_read_reward(pair) for pair in args.reward)
    except InvalidConfig as error:
        return Report(problems=error.problems)
    except (OSError, UnicodeDecodeError) as error:
        return Report(problems=[Problem("", str(args.config), f"cannot be read: {error}", "give a readable file")])
    return check(config, sources, args.uncalled)


def _read_reward(pair: str) -> tuple[str, str]:
    name, _, file = pair.partition("=")
    if not file:
        raise InvalidConfig([Problem("", pair, "--reward needs NAME=FILE", "write --reward brevity=brevity.py")])
    return name, Path(file).read_text(encoding="utf-8")


def _memory_text(memory: Mapping[str, int]) -> str:
    """The sum and what it sums, the largest first."""
    total, available = memory["total_bytes"], memory["available_bytes"]
    sums = ("total_bytes", "available_bytes", "rank_bytes")
    uses = {name: size for name, size in memory.items() if name.endswith("_bytes") and name not in sums and size}
    parts = sorted(uses.items(), key=lambda use: -use[1])
    listed = ", ".join(f"{name.removesuffix('_bytes').replace('_', ' ')} {size / 1e9:.2f}" for name, size in parts)
    ranks = f" on each of {memory['num_ranks']} ranks" if "num_ranks" in memory else ""
    return f"memory   about {total / 1e9:.1f} GB of {available / 1e9:.1f} GB free; in GB{ranks}: {listed}"


def _text(report: Report) -> str:
    lines = [f"problem  {problem}" for problem in report.problems]
    lines += [f"warning  {problem}" for problem in report.warnings]
    for prompt in report.prompts:
        lines += [
            f"prompt   {prompt.stage} {prompt.id} ({prompt.num_tokens} tokens, gold {prompt.answer})",
            prompt.text,
        ]
    lines += [
        f"reward   {gold.part} of {gold.completion!r}: {gold.value}. {gold.explanation}" for gold in report.gold_rewards
    ]
    if report.memory:
        lines.append(_memory_text(report.memory))
    count = len(report.problems)
    verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "ready to run"
    return "\n".join([*lines, f"{verdict} ({report.seconds:g} s)"])
