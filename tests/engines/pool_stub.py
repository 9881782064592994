"""A scoring process whose judge does what the completion says: `python -m tests.engines.pool_stub PARENT FD`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_engine.errors import RewardError
from grpo_engine.reward.metric import Judge, Judgement
from grpo_engine.reward.pool_child import main
from grpo_engine.types import Completion, Prompt


def obey(prompt: Prompt, completion: Completion) -> Judgement:
    order, _, argument = completion.text.partition(" ")
    if order == "spin":
        while True:
            pass
    if order == "sleep":
        time.sleep(3600)
    if order == "die":
        os._exit(3)
    if order == "die_once" and not Path(argument).exists():
        Path(argument).touch()
        os._exit(4)
    if order == "raise":
        raise ValueError(argument)
    if order == "memory":
        bytearray(6 << 30)
    if order == "work":
        until = time.process_time() + float(argument)
        while time.process_time() < until:
            pass
    if order == "start":
        Path(argument).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(3600)
    if order == "hash":
        return Judgement(0.5, str(hash("a")))
    print("a judge that prints")
    return Judgement(0.5, f"{completion.text} for {prompt.text}", (0, len(completion.text)))


def build(config: dict[str, Any], given: dict[str, Any]) -> Judge:
    """`given`: what happens while the metric is loaded."""
    if "refuse" in given:
        raise RewardError(given["refuse"])
    if given.get("die"):
        os._exit(5)
    until = time.monotonic() + given.get("load_s", 0)
    while time.monotonic() < until:
        pass
    return obey


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), build)
