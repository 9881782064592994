"""Checks of a config before launch: `python -m grpo_engine preflight --json` in a child process with a time limit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.limited import ask_engine
from app.rewards.service import custom_names
from app.settings import Settings
from grpo_engine.config import RunConfig


def check(settings: Settings, config: RunConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """The preflight's report as JSON: problems, warnings, prompts, gold_rewards, memory, seconds.

    `sources`: custom reward name -> source text; those left out are reported as not called. Raises Unavailable when
    the child exceeds the limit or dies."""
    with tempfile.TemporaryDirectory(prefix="cohort-check-") as name:
        folder = Path(name)
        arguments = _arguments(folder, config, sources)
        advice = "a custom reward that never returns is the usual cause"
        return ask_engine(arguments, folder, settings.preflight_limit_s, doing="The check", advice=advice)


def _arguments(folder: Path, config: RunConfig, sources: Mapping[str, str]) -> list[str]:
    (folder / "config.yaml").write_text(config.canonical_json())  # JSON is YAML
    arguments = ["preflight", str(folder / "config.yaml"), "--json"]
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        arguments += ["--reward", f"{name}={folder / name}.py"]
    for name in sorted(custom_names(config).keys() - sources.keys()):
        arguments += ["--uncalled", name]
    return arguments
