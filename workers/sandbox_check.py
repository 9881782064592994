"""How this host can confine programs that a model wrote, found out in a process of its own when the worker starts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import uuid
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from app.settings import Settings
from workers.beat import write_sandbox

log = logging.getLogger("cohort.worker")

CHECK_LIMIT_S = 600.0
"""Wall-clock seconds for the whole attack list; some ten on an idle host."""
NOT_TESTED: dict[str, Any] = {"tier": "not tested", "details": {"COHORT_SANDBOX_CHECK": "false"}}


class SandboxCheck(threading.Thread):
    """Runs the attack list beside the worker's start and writes what it found to the worker's row."""

    def __init__(self, settings: Settings, worker_id: uuid.UUID) -> None:
        super().__init__(name="sandbox-check", daemon=True)
        self._settings, self._worker_id = settings, worker_id
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        report = self._report() if self._settings.sandbox_check else NOT_TESTED
        log.info("sandbox: %s (%s)", report["tier"], report["details"])
        try:
            write_sandbox(self._settings, self._worker_id, report)
        except SQLAlchemyError as error:
            log.warning("could not write how programs are confined: %s", error)

    def _report(self) -> dict[str, Any]:
        command = ["nice", "-n", "10", sys.executable, "-m", "grpo_engine.reward.sandbox"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        try:
            said, errors = self._process.communicate(timeout=CHECK_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, errors = self._process.communicate()
        return read_report(said, errors)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def read_report(said: str, errors: str) -> dict[str, Any]:
    """The report that the check printed; one that says `unknown` and why when it printed none."""
    try:
        report = json.loads(said)
        return {"tier": str(report["tier"]), "details": dict(report["details"])}
    except (ValueError, KeyError, TypeError):
        lines = errors.strip().splitlines()
        return {"tier": "unknown", "details": {"check": lines[-1][:300] if lines else "it ended without a report"}}
