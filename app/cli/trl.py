"""`cohort import-trl FILE`: a TRL GRPO config as a run config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from app.cli.configs import read_config
from app.configs.trl import import_trl
from app.yaml_text import yaml_text


def import_trl_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GRPOConfig or `trl grpo --config` file, YAML or JSON.")],
    out: Annotated[Path | None, typer.Option(help="Write the config there; printed when not given.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that TRL was launched with.", min=1)] = 1,
) -> None:
    """Turn a TRL GRPO config into a run config; one line for each field that has no equal."""
    found = import_trl(read_config(file), num_processes=processes)
    text = yaml_text(found.config)
    if out is not None:
        out.write_text(f"# Imported from {file.name} by `cohort import-trl`.\n{text}")
    lines = "\n".join(found.lines) if found.lines else "Every field has an equal."
    if out is None:
        print(text, end="")
        print(lines, file=sys.stderr)
    else:
        print(lines)
        print(f"Wrote {out}; check it with `cohort config check -f {out}`.")
