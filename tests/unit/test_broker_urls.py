"""Where the broker listens and what happens when it is away: no server needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.broker import BrokerFailed, celery_url, ensure_broker, redis_url, send_work
from app.settings import Settings


def test_a_redis_url_is_used_as_it_is() -> None:
    settings = Settings(redis_url="redis://10.0.0.1:6379/0")
    assert celery_url(settings) == redis_url(settings) == "redis://10.0.0.1:6379/0"


def test_celery_and_redis_py_name_the_same_socket_differently(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert celery_url(settings) == f"redis+socket://{tmp_path}/valkey/valkey.sock"
    assert redis_url(settings) == f"unix://{tmp_path}/valkey/valkey.sock"


@pytest.mark.parametrize("name", ["x" * 120, "with a space", "what?"])
def test_a_home_that_no_socket_url_can_name_gets_a_short_stable_path(tmp_path: Path, name: str) -> None:
    settings = Settings(home=tmp_path / name)
    path = redis_url(settings).removeprefix("unix://")
    assert path.startswith(f"/tmp/cohort-{os.getuid()}/")
    assert len(path) < 60
    assert path == redis_url(Settings(home=tmp_path / name)).removeprefix("unix://")
    assert path != redis_url(Settings(home=tmp_path / f"{name}2")).removeprefix("unix://")


def test_sending_work_without_a_broker_is_no_error(tmp_path: Path) -> None:
    assert send_work(Settings(home=tmp_path)) is False


def test_an_unreachable_redis_is_named_without_its_password() -> None:
    with pytest.raises(BrokerFailed) as caught:
        ensure_broker(Settings(redis_url="redis://:secret@127.0.0.1:1/0"))
    assert "redis://127.0.0.1:1/0" in str(caught.value)
    assert "secret" not in str(caught.value)
