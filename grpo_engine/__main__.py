"""The engine's command line: `python -m grpo_engine COMMAND`; COMMANDS says which there are."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "run": ("grpo_engine.standalone", "train a config into a folder, without web, broker or database"),
    "rank": ("grpo_engine.rank", "one training process (started by `run` and by workers)"),
    "preflight": ("grpo_engine.preflight", "check a config against its model folder, data and rewards"),
    "score": ("grpo_engine.score", "rewards of given completions: JSON on standard input, JSON out"),
    "replay": ("grpo_engine.replay", "score stored rollouts again by the rewards of another config"),
    "preference-accuracy": ("grpo_engine.preference_accuracy", "how often a reward model prefers the better answer"),
    "merge-checkpoint": ("grpo_engine.merge", "make a model folder of a checkpoint with an adapter and its base"),
    "import-smollm2": ("grpo_engine.model.smollm2", "make a model folder of SmolLM2-135M-Instruct"),
}


def main(arguments: list[str] | None = None) -> int:
    """Only the chosen command's module is imported, so that checks stay free of torch."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m grpo_engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if argument in COMMANDS), None)
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            import_module(COMMANDS[name][0]).add_arguments(command)
    parsed = parser.parse_args(arguments)
    result: int = import_module(COMMANDS[parsed.command][0]).main(parsed)
    return result


if __name__ == "__main__":
    sys.exit(main())
