"""What keeps a house from starting, each in one sentence."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.house_checks import HomeLock, LaunchFailed, check_machine, free_port_or_fail
from app.launcher import address_of, environment_of
from app.settings import Settings


def test_a_taken_port_is_named_with_another_one_to_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchFailed, match=rf"Port {port} on 127\.0\.0\.1 is taken: .*COHORT_PORT={port + 1}"):
            free_port_or_fail("127.0.0.1", port)
    free_port_or_fail("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(LaunchFailed, match=r"Cannot listen on 192\.0\.2\.1:8000 .*COHORT_HOST"):
        free_port_or_fail("192.0.2.1", 8000)


def test_an_unwritable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LaunchFailed, match=r"Cannot write to the home .*/file/home .*COHORT_HOME"):
        HomeLock(tmp_path / "file" / "home", "http://x")


def test_a_home_that_is_served_names_who_serves_it(tmp_path: Path) -> None:
    first = HomeLock(tmp_path, "http://127.0.0.1:8123")
    with pytest.raises(LaunchFailed, match=r"already served by process \d+ at http://127\.0\.0\.1:8123"):
        HomeLock(tmp_path, "http://127.0.0.1:9000")
    first.release()
    HomeLock(tmp_path, "http://127.0.0.1:9000").release()


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(LaunchFailed, match="no_such_package is missing: run `make install`"):
        check_machine(("json", "no_such_package"))


def test_children_read_the_settings_of_their_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, port=8123, beat_s=1, deadline_s=4, loss_s=6, worker_labels="a,b")
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_the_address_can_be_opened_on_this_machine(host: str, address: str) -> None:
    assert address_of(Settings(host=host, port=80)) == address
