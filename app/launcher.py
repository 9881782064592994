"""`cohort up`: broker, schema, web, scheduler and worker as one house that starts and stops in order.

    with House(settings) as house:
        print(house.url)
        house.wait()        # until Ctrl-C, SIGTERM or the death of a child

Every child lives in a session of its own, so Ctrl-C reaches the launcher alone, and dies with it, even by SIGKILL.
Stopping goes worker (with its grace, in which engines write checkpoints), scheduler, web, broker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from app.broker import Broker, BrokerFailed, die_with_parent, ensure_broker, stop_broker
from app.db import Database
from app.house_checks import HomeLock, LaunchFailed, check_machine, free_port_or_fail
from app.migrate import upgrade
from app.security import UnsafeBind, check_bind
from app.settings import Settings
from app.users import service as users

WEB_START_S = 60.0
WEB_STOP_S = 10.0
SCHEDULER_STOP_S = 10.0
WORKER_MARGIN_S = 15.0
"""What the worker may take beyond the engine's own grace."""
TAIL_LINES = 15


class ChildDied(Exception):
    """A child ended by itself; the message names it, its log and the log's last lines."""


@dataclass(frozen=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_s: float
    """Seconds between SIGTERM and SIGKILL."""


class House:
    """Everything of one home. Use from the main thread; start raises LaunchFailed with one clear sentence."""

    def __init__(self, settings: Settings, say: Callable[[str], None] = print) -> None:
        self.settings = settings.model_copy(update={"home": settings.home.resolve()})
        self.url = address_of(settings)
        self._say = say
        self._children: list[Child] = []
        self._broker: Broker | None = None
        self._lock: HomeLock | None = None
        self._asked = threading.Event()
        self._hurry = False

    # ------------------------------------------------------------ start
    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._start()
        except (BrokerFailed, UnsafeBind) as error:
            self.stop()
            raise LaunchFailed(str(error)) from error
        except OperationalError as error:
            self.stop()
            url = make_url(self.settings.resolved_database_url).render_as_string(hide_password=True)
            raise LaunchFailed(f"Cannot use the database {url}: {str(error.orig).strip()}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        check_machine()
        self._lock = HomeLock(self.settings.home, self.url)
        free_port_or_fail(self.settings.host, self.settings.port)
        self._broker = ensure_broker(self.settings)
        upgrade(self.settings)
        database = Database(self.settings.resolved_database_url)
        with database.write() as session:
            users.ensure_first_user(session)
        check_bind(self.settings, database)
        database.dispose()
        web = ["-m", "uvicorn", "app.main:create_app", "--factory", "--host", self.settings.host]
        web += ["--port", str(self.settings.port), "--no-access-log", "--timeout-graceful-shutdown", "3"]
        self._run("web", web, WEB_STOP_S)
        self._wait_for_web()
        if not self.asked_to_stop:
            self._run("scheduler", ["-m", "workers.scheduler"], SCHEDULER_STOP_S)
            self._run("worker", ["-m", "workers"], self.settings.stop_grace_s + WORKER_MARGIN_S)

    def _run(self, name: str, arguments: Sequence[str], stop_s: float) -> None:
        log = self.settings.home / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment_of(self.settings) | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._children.append(Child(name, process, log, stop_s))

    def _wait_for_web(self) -> None:
        pause = 0.1
        for _ in range(int(WEB_START_S / pause)):
            self.check()
            try:
                httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False)
                return
            except httpx.TransportError:
                if self._asked.wait(pause):
                    return
        raise LaunchFailed(f"The web application did not answer within {WEB_START_S:g} s; see {self._children[0].log}.")

    # ------------------------------------------------------------ while it runs
    @property
    def asked_to_stop(self) -> bool:
        return self._asked.is_set()

    def login_link(self) -> str:
        """Address with a fresh one-time link for the first user."""
        database = Database(self.settings.resolved_database_url)
        with database.write() as session:
            secret = users.make_login_link(session, users.ensure_first_user(session))
        database.dispose()
        return users.login_url(self.settings.model_copy(update={"host": _browsable(self.settings.host)}), secret)

    def check(self) -> None:
        """Raises ChildDied when a child has ended by itself."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and not self.asked_to_stop:
                raise ChildDied(_obituary(child, code))
        if self._broker and self._broker.process and self._broker.process.poll() is not None and not self.asked_to_stop:
            self._broker = ensure_broker(self.settings)  # nothing is lost with it; the reaper sends again
            self._say("The broker ended by itself and was started again.")

    def wait(self, seconds: float | None = None) -> bool:
        """True as soon as a stop was asked for, False after `seconds`. Raises ChildDied."""
        waited = 0.0
        while not self._asked.wait(step := 0.5 if seconds is None else min(0.5, seconds - waited)):
            self.check()
            waited += step
            if seconds is not None and waited >= seconds:
                return False
        return True

    # ------------------------------------------------------------ stop
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop everything in order; returns when no child is left."""
        self._asked.set()
        for child in reversed(self._children):
            if child.process.poll() is None:
                self._say(f"Stopping {child.name} …")
            self._end(child)
        self._children.clear()
        if self._broker is not None:
            stop_broker(self.settings, self._broker)
            self._broker = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _end(self, child: Child) -> None:
        child.process.terminate()
        for _ in range(int(child.stop_s / 0.1)):
            if self._hurry:
                break
            try:
                child.process.wait(0.1)
                return
            except subprocess.TimeoutExpired:
                continue
        child.process.kill()
        child.process.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._hurry = self._asked.is_set()  # asked twice: do not wait for anyone
        self._asked.set()


def environment_of(settings: Settings) -> dict[str, str]:
    """The variables that make a child read the same settings."""
    values = settings.model_dump() | {"secret_key": settings.secret_key.get_secret_value()}
    texts = {name: json.dumps(value) if isinstance(value, list) else str(value) for name, value in values.items()}
    return {f"COHORT_{name.upper()}": text for name, text in texts.items()}


def address_of(settings: Settings) -> str:
    """Where a browser on this machine finds the web application."""
    host = _browsable(settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _browsable(host: str) -> str:
    """A wildcard address cannot be opened in a browser; this machine can."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _obituary(child: Child, code: int) -> str:
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    with open(child.log, "rb") as file:
        file.seek(max(0, child.log.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    text = "\n".join(f"    {line}" for line in lines)
    return f"The {child.name} ended by itself {how}. Its log is {child.log}; the last lines:\n{text}"
