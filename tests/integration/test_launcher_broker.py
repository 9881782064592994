"""The embedded broker as a real server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from app.broker import QUEUE, TASK_NAME, Broker, ensure_broker, send_work, stop_broker
from app.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def broker(settings: Settings) -> Iterator[Broker]:
    broker = ensure_broker(settings)
    yield broker
    stop_broker(settings, broker)


def test_work_arrives_on_the_queue_by_name(settings: Settings, broker: Broker) -> None:
    assert send_work(settings) is True
    with redis.Redis.from_url(broker.redis_url) as client:
        message = json.loads(client.lindex(QUEUE, 0))  # type: ignore[arg-type]
    assert message["headers"]["task"] == TASK_NAME


def test_a_second_launcher_joins_the_server_of_this_home(settings: Settings, broker: Broker) -> None:
    assert broker.process is not None
    second = ensure_broker(settings)
    assert second.process is None
    assert second.celery_url == broker.celery_url


def test_work_can_be_sent_again_after_a_kill_and_a_restart(settings: Settings, broker: Broker) -> None:
    assert broker.process is not None
    assert send_work(settings)
    broker.process.kill()
    broker.process.wait()
    assert send_work(settings) is False
    restarted = ensure_broker(settings)
    assert send_work(settings) is True
    stop_broker(settings, restarted)


def test_a_frozen_broker_holds_no_request(settings: Settings, broker: Broker) -> None:
    assert broker.process is not None
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        assert send_work(settings) is False
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)


def test_stopping_a_joined_broker_ends_the_server(settings: Settings, broker: Broker) -> None:
    assert broker.process is not None
    stop_broker(settings, ensure_broker(settings))
    assert broker.process.wait(5) == 0
