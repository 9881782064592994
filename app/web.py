"""Pages: templates, fragments, what every page shows, flash messages, error pages.

A page is one template and one context dataclass; a fragment is a named block of its page. Model text is always escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2_fragments import render_block
from sqlalchemy import func, select

from app import formatting
from app.form_nodes import kind_label
from app.models import Run, User, Worker
from app.security import Reader, allowed, csrf_token
from grpo_engine.errors import Problem

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "app" / "static"
FLASH_COOKIE = "cohort_flash"
UNFINISHED = ("queued", "starting", "running", "pausing", "paused", "cancelling")
ACTIVE = ("starting", "running", "pausing", "cancelling")


@dataclass(frozen=True)
class Look:
    tone: str
    sign: str


LOOKS = {
    "queued": Look("", "○"), "starting": Look("run", "◔"), "running": Look("run", "●"), "pausing": Look("warn", "◑"),
    "paused": Look("warn", "‖"), "cancelling": Look("warn", "◑"), "completed": Look("good", "✓"),
    "failed": Look("bad", "✕"), "cancelled": Look("", "⊘"), "stopping": Look("warn", "◑"),
    "finished": Look("good", "✓"), "stopped": Look("", "■"), "lost": Look("bad", "✕"), "online": Look("good", "●"),
    "offline": Look("", "○"), "draining": Look("warn", "◑"), "saved": Look("", "○"), "verified": Look("good", "✓"),
    "damaged": Look("bad", "✕"), "removed": Look("", "⊘"),
}  # fmt: skip


@dataclass(frozen=True)
class NavItem:
    label: str
    href: str
    current: bool
    count: int | None = None
    line: bool = False
    """A line above it."""


# ---------------------------------------------------------------- templates
def static_url(path: str) -> str:
    """Address of a static file with a part that changes with its content."""
    return f"/static/{path}?v={_content_hash(path)}"


@lru_cache
def _content_hash(path: str) -> str:
    return hashlib.sha256((STATIC / path).read_bytes()).hexdigest()[:10]


@lru_cache
def environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(ROOT / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        name: getattr(formatting, name)
        for name in (
            "number",
            "fixed",
            "signed",
            "percent",
            "size",
            "duration",
            "age",
            "middle",
            "short_hash",
            "spark_path",
        )
    }
    env.filters["kind"] = kind_label
    env.filters["state_look"] = lambda state: LOOKS.get(state, Look("", "○"))
    env.globals["static"] = static_url
    env.globals["ui"] = env.get_template("_ui.html").module
    return env


def page(request: Request, template: str, context: Any, *, block: str | None = None, status: int = 200) -> HTMLResponse:
    """The page, or only its named block. `context` is the page's dataclass."""
    values = values_of(context)
    if block is not None:
        html = render_fragment(template, block, values | _request_values(request, with_nav=False))
        return HTMLResponse(html, status, {"Vary": "HX-Request", "Cache-Control": "no-store"})
    html = environment().get_template(template).render(values | _request_values(request, with_nav=True))
    response = HTMLResponse(html, status, {"Vary": "HX-Request", "Cache-Control": "no-store"})
    if FLASH_COOKIE in request.cookies:
        response.delete_cookie(FLASH_COOKIE, path="/")
    return response


def render_fragment(template: str, block: str, values: dict[str, Any]) -> str:
    return str(render_block(environment(), template, block, values))


def values_of(context: Any) -> dict[str, Any]:
    return {field.name: getattr(context, field.name) for field in fields(context)}


def _request_values(request: Request, *, with_nav: bool) -> dict[str, Any]:
    user: User | None = getattr(request.state, "user", None)
    return {
        "csrf_token": csrf_token(request),
        "user_name": user.name if user else "",
        "can": lambda permission: user is not None and allowed(user, permission),
        "nav": navigation(request) if with_nav and user else [],
        "flashes": read_flash(request) if with_nav else [],
    }


def navigation(request: Request) -> list[NavItem]:
    path = request.url.path
    with request.app.state.database.read() as session:
        runs = session.scalar(select(func.count()).select_from(Run).where(Run.state.in_(ACTIVE)))
        workers = session.scalar(select(func.count()).select_from(Worker).where(Worker.state == "online"))
    items = [("Runs", "/runs", runs or None, False), ("Configs", "/configs", None, False)]
    items += [("Checkpoints", "/checkpoints", None, False), ("Rewards", "/rewards", None, False)]
    items += [("Workers", "/workers", workers, True), ("Settings", "/settings", None, False)]
    return [NavItem(label, href, path.startswith(href), count, line) for label, href, count, line in items]


# ---------------------------------------------------------------- flash messages
@dataclass(frozen=True)
class Flash:
    text: str
    kind: str = "good"


def redirect(url: str, flash: str = "", kind: str = "good") -> RedirectResponse:
    """See other, with a message that the next page shows once."""
    response = RedirectResponse(url, 303)
    if flash:
        value = base64.urlsafe_b64encode(json.dumps([flash, kind]).encode()).decode()
        response.set_cookie(FLASH_COOKIE, value, max_age=60, httponly=True, samesite="lax", path="/")
    return response


def read_flash(request: Request) -> list[Flash]:
    try:
        text, kind = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH_COOKIE, "")))
    except (ValueError, TypeError):
        return []
    return [Flash(str(text), kind if kind in ("good", "warn", "bad") else "good")]


# ---------------------------------------------------------------- errors
@dataclass(frozen=True)
class ErrorContext:
    status: int
    heading: str
    detail: str
    problems: list[Problem]


def error_page(request: Request, status: int, title: str, detail: str, problems: Sequence[Problem]) -> Response:
    """What a browser sees of an error. For htmx only a notice at the top, which leaves the page as it was."""
    context = ErrorContext(status, title, detail, list(problems))
    if request.headers.get("HX-Request") != "true":
        return page(request, "error.html", context, status=status)
    response = page(request, "error.html", context, block="notice", status=status)
    response.headers["HX-Retarget"] = "#notices"
    response.headers["HX-Reswap"] = "innerHTML show:top"
    return response


# ---------------------------------------------------------------- routers
def _remember(request: Request, user: Reader) -> None:
    request.state.user = user


SignedIn = Annotated[None, Depends(_remember)]


def pages_router() -> APIRouter:
    """Router of pages that only a signed-in user sees."""
    return APIRouter(include_in_schema=False, dependencies=[Depends(_remember)])


def include_pages(app: FastAPI) -> None:
    from app import live
    from app.checkpoints import pages as checkpoints
    from app.configs import pages as configs
    from app.rewards import pages as rewards
    from app.rewards import playground_pages, replay_pages
    from app.rollouts import pages as rollouts
    from app.rollouts import search_pages
    from app.runs import about_pages, list_pages, new_pages, steer_pages
    from app.runs import pages as runs
    from app.users import pages as users
    from app.workers import pages as workers

    app.state.error_page = error_page
    features = (
        new_pages, live, list_pages, runs, about_pages, steer_pages, rollouts, search_pages, checkpoints, configs,
        playground_pages, replay_pages, rewards, workers, users,
    )  # fmt: skip
    for feature in features:
        app.include_router(feature.router)
