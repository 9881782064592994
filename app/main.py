"""The web application: features, pages, static files, security headers."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.artifacts import open_store
from app.checkpoints.api import router as checkpoints
from app.configs.api import router as configs
from app.db import Database
from app.errors import Forbidden, install_handlers, problem_response
from app.findings.api import router as findings
from app.metrics.api import router as metrics
from app.rewards.api import router as rewards
from app.rewards.replay_api import router as replays
from app.rewards.replay_owners import replays_kept
from app.rollouts.api import router as rollouts
from app.runs.api import router as runs
from app.runs.log_api import router as logs
from app.security import SAFE_METHODS, check_bind, csrf_token, is_cross_site, load_secret_key
from app.settings import Settings, get_settings
from app.users.api import router as users
from app.web import include_pages
from app.workers.api import router as workers

STATIC = Path(__file__).parent / "static"
FEATURES = (runs, logs, configs, metrics, rollouts, checkpoints, findings, rewards, replays, workers, users)
CSP = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
DOCS_CSP = CSP.replace("img-src", "style-src 'self' 'unsafe-inline'; img-src")
"""Swagger UI sets styles of its own."""
SECURITY_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application on the database that `settings` names; its tables must exist (app.migrate)."""
    settings = settings or get_settings()
    app = FastAPI(
        title="Cohort",
        version="1",
        description="Launch, watch and read reinforcement-learning runs of language models.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.settings = settings
    app.state.database = Database(settings.resolved_database_url)
    app.state.store = open_store(settings)
    app.state.secret_key = load_secret_key(settings)
    install_handlers(app)
    app.add_middleware(Guard)
    for router in FEATURES:
        app.include_router(router, prefix="/api/v1")
    app.add_api_route("/docs", _docs, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    include_pages(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    check_bind(app.state.settings, app.state.database)
    with replays_kept(app.state.database, app.state.settings):
        yield
    app.state.database.dispose()


class Guard:
    """Refuses writes that another site caused; adds the security headers to every answer.

    Plain ASGI, so that event streams pass through untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        if request.method not in SAFE_METHODS and is_cross_site(request):
            refusal = problem_response(403, Forbidden.title, "This write was caused by another site.")
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def _docs(request: Request) -> HTMLResponse:
    page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Cohort API</title>
<meta name="csrf-token" content="{html.escape(csrf_token(request))}">
<link rel="icon" href="data:,"><link rel="stylesheet" href="/static/vendor/swagger/swagger-ui.css">
<script src="/static/vendor/swagger/swagger-ui-bundle.js"></script>
<script src="/static/vendor/swagger/start.js"></script></head><body><div id="swagger-ui"></div></body></html>"""
    return HTMLResponse(page, headers={"Content-Security-Policy": DOCS_CSP})
