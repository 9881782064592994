"""`cohort checkpoint …`: work on checkpoint folders of this machine, without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

checkpoint_cli = typer.Typer(help="Checkpoints.", no_args_is_help=True)


@checkpoint_cli.command("merge")
def merge(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint with an adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    base: Annotated[Path | None, typer.Option(help="Folder of the base, when it is no longer where it was.")] = None,
) -> None:
    """Make a model folder of a LoRA checkpoint: base and adapter in one, loadable everywhere."""
    command = [sys.executable, "-m", "grpo_engine", "merge-checkpoint", str(checkpoint), "--out", str(out)]
    command += [] if base is None else ["--base", str(base)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
