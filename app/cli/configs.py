"""Config files given on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.cli.failures import CliError
from grpo_engine.config_errors import read_yaml


def named_file(pair: str) -> tuple[str, Path]:
    """`NAME=FILE`, or FILE alone, which is named like the file without its ending."""
    name, _, file = pair.rpartition("=")
    return name or Path(file).stem, Path(file)


def read_config(path: Path) -> dict[str, Any]:
    """The YAML mapping in `path`. Raises InvalidConfig naming the line that is no YAML or a key given twice."""
    try:
        data = read_yaml(path.read_text(), source=str(path))
    except OSError as error:
        raise CliError(f"Cannot read the config {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not text: {error.reason}.") from error
    if not isinstance(data, dict):
        raise CliError(f"{path} must hold a mapping such as `name: …`, not {type(data).__name__}.")
    return data
