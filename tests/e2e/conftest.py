"""A real browser against the real web application: uvicorn on a free port, a seeded home, Chromium.

A console error, an uncaught exception or a request that leaves localhost fails the test that caused it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from app.db import Database
from app.settings import Settings
from app.users.service import ensure_first_user, make_login_link
from tests.applications import application
from tests.waiting import wait_until

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
    "--disable-dev-shm-usage",
]  # fmt: skip
WAIT_MS = 15_000


@dataclass
class Web:
    """The running application."""

    url: str
    settings: Settings
    database: Database

    def login_link(self) -> str:
        with self.database.write() as session:
            return f"{self.url}/login/{make_login_link(session, ensure_first_user(session))}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(app: FastAPI, settings: Settings, port: int) -> Iterator[Web]:
    config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 20, "the web application answers")
    yield Web(f"http://127.0.0.1:{port}", settings, app.state.database)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def web(seeded_settings: Settings) -> Iterator[Web]:
    """The application on a copy of the seeded home: run 1 completed, 2 running, 3 failed."""
    port = free_port()
    settings = seeded_settings.model_copy(update={"port": port})
    yield from served(application(settings), settings, port)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Closed after the last test of this package: Playwright keeps an event loop running in the main thread."""
    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing; `apt-get install chromium` provides it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Watcher:
    """Notes what must not happen on a page."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.expected: list[str] = []
        """Parts of console messages that the test brings about on purpose, such as `status of 422`."""

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(part in message.text for part in self.expected):
            self.found.append(f"console: {message.text}")

    def on_request(self, request: Request) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", "localhost", None):
            self.found.append(f"request: {request.url}")

    def watch(self, page: Page) -> Page:
        page.on("console", self.on_console)
        page.on("pageerror", lambda error: self.found.append(f"exception: {error}"))
        page.on("request", self.on_request)
        page.set_default_timeout(WAIT_MS)
        return page


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    made = Watcher()
    yield made
    assert made.found == []


Open = Callable[..., BrowserContext]


@pytest.fixture
def open_context(chromium: Browser, web: Web) -> Iterator[Open]:
    """Opens a browser context that is logged in."""
    opened: list[BrowserContext] = []

    def make(**options: object) -> BrowserContext:
        context = chromium.new_context(**{"viewport": {"width": 1440, "height": 940}, **options})  # type: ignore[arg-type]
        opened.append(context)
        page = context.new_page()
        page.goto(web.login_link())
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/runs")
        page.close()
        return context

    yield make
    for context in opened:
        context.close()


@pytest.fixture
def page(open_context: Open, watcher: Watcher) -> Page:
    return watcher.watch(open_context().new_page())
