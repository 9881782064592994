"""The `cohort` command. A fault is a sentence and an exit status, never a traceback: 2 for an invalid config."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from app.cli.failures import report
    from app.cli.root import cli

    try:
        cli()
    except Exception as error:
        if os.environ.get("COHORT_DEBUG"):
            raise
        sys.exit(report(error))
