"""`python -m workers`: one worker. Its Celery child claims and supervises runs, one after the other.

SIGTERM or SIGINT: the running engine writes a checkpoint, its run goes back to the queue, the worker leaves.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

from celery import Celery
from celery.signals import worker_ready, worker_shutting_down
from sqlalchemy.exc import SQLAlchemyError

from app.broker import QUEUE
from app.settings import get_settings
from grpo_engine.launch import become_subreaper
from workers.beat import WorkerBeat, register, sign_off
from workers.celery_app import make_app
from workers.context import WorkerContext, set_context
from workers.devices import Device, list_devices
from workers.sandbox_check import SandboxCheck

log = logging.getLogger("cohort.worker")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    settings = get_settings()
    try:
        devices = list_devices(settings)
        name = settings.worker_name or default_name(devices)
        labels = [label.strip() for label in settings.worker_labels.split(",") if label.strip()]
        worker_id = register(settings, name, labels, devices)
    except (ValueError, SQLAlchemyError) as error:
        print(f"the worker cannot start: {error}", file=sys.stderr)
        return 2
    become_subreaper()
    context = WorkerContext(settings, worker_id, name, labels, [device.id for device in devices])
    set_context(context)
    beat = WorkerBeat(settings, worker_id)
    beat.start()
    check = SandboxCheck(settings, worker_id)
    check.start()
    log.info("worker %s offers %s", name, ", ".join(context.devices))
    try:
        return run_celery(make_app(settings), context)
    finally:
        check.stop()
        beat.stop()
        sign_off(settings, worker_id)


def default_name(devices: list[Device]) -> str:
    """Host and devices, such as `node7/cuda:0,1`."""
    kind = devices[0].kind
    return f"{socket.gethostname()}/{kind}:{','.join(device.id.partition(':')[2] for device in devices)}"


def run_celery(app: Celery, context: WorkerContext) -> int:
    """Until a signal; the exit status. Celery waits for its child, which ends the engine because of the context."""

    def on_shutting_down(**_: object) -> None:
        context.request_shutdown()

    def on_ready(**_: object) -> None:
        # Celery would end its child at once on SIGINT, and restart itself on SIGHUP.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.getsignal(signal.SIGTERM))

    worker_shutting_down.connect(on_shutting_down, weak=False)
    worker_ready.connect(on_ready, weak=False)
    node = f"{context.worker_id}@{socket.gethostname()}"
    options = ["--pool", "prefork", "--concurrency", "1", "--queues", QUEUE, "--hostname", node, "--loglevel", "INFO"]
    try:
        app.worker_main(["--quiet", "worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
