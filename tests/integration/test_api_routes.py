"""Promises that hold for every route, taken from the route table."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from tests import routes
from tests.applications import application
from tests.callers import browser

WALK = """
import sys
from pathlib import Path
from fastapi.testclient import TestClient
from app.main import create_app
from app.settings import Settings
from tests import routes
from tests.callers import bearer
app = create_app(Settings(home=Path(sys.argv[1])))
with TestClient(app, headers=bearer(app)) as client:
    for address in routes.addresses(app):
        body = {} if address.method in ("GET", "DELETE") else {"json": {}}
        client.request(address.method, address.url, **body)
loaded = {"torch", "transformers", "vllm", "deepspeed"} & sys.modules.keys()
assert not loaded, loaded
"""


def route_facts(route: Any) -> tuple[Any, ...]:
    return type(route), route.path, route.name, getattr(route, "methods", None)


def test_the_applications_of_tests_are_as_those_of_users(seeded_settings: Settings) -> None:
    application(seeded_settings)
    shared, own = application(seeded_settings), create_app(seeded_settings)
    assert list(map(route_facts, shared.routes)) == list(map(route_facts, own.routes))
    assert list(shared.state) == list(own.state)
    for name in ("settings", "secret_key", "error_page"):
        assert shared.state[name] == own.state[name]
    assert shared.state.database.url == own.state.database.url
    for app in (shared, own):
        app.state.database.dispose()


def test_no_route_loads_torch_or_transformers(seeded_settings: Settings) -> None:
    walk = subprocess.run([sys.executable, "-c", WALK, str(seeded_settings.home)], capture_output=True, text=True)
    assert walk.returncode == 0, walk.stderr


def test_every_reading_route_answers_on_a_seeded_home(seeded: TestClient, seeded_app: FastAPI) -> None:
    for address in routes.gets(seeded_app):
        if not address.url.startswith("/login"):
            answer = seeded.get(address.url, follow_redirects=True)
            assert answer.status_code == 200, (address, answer.text[:500])


def test_no_get_changes_the_database(seeded: TestClient, seeded_app: FastAPI) -> None:
    addresses = routes.gets(seeded_app)
    before = routes.fingerprint(seeded_app.state.database)
    for address in addresses:
        seeded.get(address.url)
    assert routes.fingerprint(seeded_app.state.database) == before


def test_nobody_reads_anything_without_signing_in(seeded_app: FastAPI) -> None:
    with TestClient(seeded_app, follow_redirects=False) as nobody:
        for address in routes.gets(seeded_app):
            if address.template not in routes.OPEN and not address.template.startswith("/login"):
                answer = nobody.get(address.url)
                assert answer.status_code in (303, 401), (address, answer.status_code)


def test_nobody_writes_anything_without_signing_in(seeded_app: FastAPI) -> None:
    before = None
    with TestClient(seeded_app, follow_redirects=False) as nobody:
        addresses = [address for address in routes.writes(seeded_app) if not address.template.startswith("/login")]
        before = routes.fingerprint(seeded_app.state.database)
        for address in addresses:
            answer = nobody.request(address.method, address.url)
            assert answer.status_code in (401, 403), (address, answer.status_code)
    assert routes.fingerprint(seeded_app.state.database) == before


def test_a_browser_writes_nothing_without_its_csrf_token(seeded_app: FastAPI) -> None:
    addresses = [address for address in routes.writes(seeded_app) if not address.template.startswith("/login")]
    forged = browser(seeded_app, csrf=False)
    before = routes.fingerprint(seeded_app.state.database)
    contents: list[dict[str, Any]] = [{"json": {}}, {"data": {"csrf_token": "0" * 64}}]
    for address in addresses:
        for content in contents:
            answer = forged.request(address.method, address.url, **content)
            assert answer.status_code == 403, (address, answer.status_code)
    assert routes.fingerprint(seeded_app.state.database) == before


def test_writes_caused_by_another_site_are_refused(seeded: TestClient, seeded_app: FastAPI) -> None:
    addresses = routes.writes(seeded_app)
    before = routes.fingerprint(seeded_app.state.database)
    for address in addresses:
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.test"}):
            answer = seeded.request(address.method, address.url, headers=headers)
            assert answer.status_code == 403, (address, answer.status_code)
    assert routes.fingerprint(seeded_app.state.database) == before


def test_every_answer_carries_the_security_headers(seeded: TestClient, seeded_app: FastAPI) -> None:
    for path in ("/api/v1/runs", "/api/v1/nothing", "/docs", "/static/vendor/swagger/start.js"):
        headers = seeded.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"].partition("style-src")[0]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_docs_ask_nothing_of_other_hosts(seeded: TestClient) -> None:
    page = seeded.get("/docs").text
    assert "http://" not in page
    assert "https://" not in page
    for asset in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js"):
        assert seeded.get(f"/static/vendor/swagger/{asset}").status_code == 200
    assert seeded.get("/openapi.json").json()["paths"]["/api/v1/runs"]["post"]


@pytest.mark.parametrize(
    "path",
    [
        "/runs/1/steps/1-rl/{}", "/runs/1/steps/1-rl/12?attempt={}", "/runs/1/attempts/{}/engine.log",
        "/runs/1/log?attempt={}", "/runs/1/events?after={}", "/api/v1/runs/1/batches?step={}",
        "/api/v1/runs/1/series?names=loss&attempt={}", "/api/v1/runs/1/series?names=loss&after_step={}",
        "/api/v1/runs/1/attempts/{}/batches/1/groups/0", "/api/v1/runs/1/log?attempt={}",
    ],
)  # fmt: skip
def test_a_number_that_no_column_holds_is_named(seeded: TestClient, path: str) -> None:
    answer = seeded.get(path.format(10**30))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["value"] == f"'{10**30}'"
