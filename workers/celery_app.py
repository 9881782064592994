"""The Celery application of a worker. A message says "there is work" and carries nothing; the task pulls.

Delivery is at most once and unacknowledged messages do not exist: the database owns the run, and the scheduler sends
again while a run is queued. No setting of Celery with Redis gives both "never twice" and "never lost" for long tasks.
"""

from __future__ import annotations

from celery import Celery

from app.broker import QUEUE, TASK_NAME, celery_url
from app.settings import Settings
from workers.context import get_context

MAX_TASKS_PER_CHILD = 100
"""The child only supervises; the engine is a fresh process each time. A new child after every message would keep a
queued run waiting for seconds, which is how long the pool takes to replace one."""
WEEK_S = 7 * 24 * 3600


def make_app(settings: Settings) -> Celery:
    """Celery with the one task `cohort.work`."""
    app = Celery("cohort", broker=celery_url(settings), set_as_current=True)
    app.conf.update(
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        task_ignore_result=True,
        result_backend=None,
        task_default_queue=QUEUE,
        worker_concurrency=1,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,  # a message waits for a free worker, never behind a long run
        worker_max_tasks_per_child=MAX_TASKS_PER_CHILD,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"visibility_timeout": WEEK_S, "health_check_interval": 10},
    )

    @app.task(name=TASK_NAME, ignore_result=True)  # type: ignore[untyped-decorator]
    def work() -> None:
        from workers.work import work_until_idle

        work_until_idle(get_context())

    return app
