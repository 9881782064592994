"""Errors the web application answers with, as problem+json (RFC 9457) or as a page.

AppError             status
├── BadRequest       400   the request cannot be understood (a broken cursor, a forbidden artifact key)
├── NotSignedIn      401
├── Forbidden        403   signed in, but without the permission; or a forged cross-site request
├── NotFound         404
├── Conflict         409   the thing is in a state that does not allow it
├── Invalid          422   fields are wrong; `problems` names each with value and remedy
├── TooManyRequests  429
└── Unavailable      503   a part this needs cannot answer now

Engine errors: InvalidConfig becomes 422 with its problems. Anything else is our bug: 500, logged with its traceback,
of which the client sees nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from grpo_engine.errors import InvalidConfig, Problem

logger = logging.getLogger(__name__)

ErrorPage = Callable[[Request, int, str, str, list[Problem]], Response]
"""(request, status, title, detail, problems) -> page; `app.state.error_page`, set by app.web."""


class AppError(Exception):
    """Base: a typed status, a sentence for a person and, where fields are to blame, their problems."""

    status = 500
    title = "Something went wrong"

    def __init__(
        self, detail: str, problems: Sequence[Problem] = (), *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.problems = list(problems)
        self.headers = dict(headers or {})


class BadRequest(AppError):
    status = 400
    title = "Bad request"


class NotSignedIn(AppError):
    status = 401
    title = "Not signed in"


class Forbidden(AppError):
    status = 403
    title = "Not allowed"


class NotFound(AppError):
    status = 404
    title = "Not found"


class Conflict(AppError):
    status = 409
    title = "Not in this state"


class Invalid(AppError):
    status = 422
    title = "Invalid input"

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Invalid:
        return cls(summary_of(problems), problems)


class TooManyRequests(AppError):
    status = 429
    title = "Too many requests"


class Unavailable(AppError):
    status = 503
    title = "Not available"


class FieldProblem(BaseModel):
    """One field that is wrong."""

    field: str
    value: str
    message: str
    remedy: str


class ProblemDocument(BaseModel):
    """RFC 9457 problem document; every error of the API has this shape."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = []


def summary_of(problems: Sequence[Problem]) -> str:
    return "1 problem: " + str(problems[0]) if len(problems) == 1 else f"{len(problems)} problems"


def wants_html(request: Request) -> bool:
    """A browser's navigation outside the API."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")


def problem_response(
    status: int, title: str, detail: str, problems: Sequence[Problem] = (), headers: Mapping[str, str] | None = None
) -> JSONResponse:
    document = {
        "type": "urn:cohort:" + title.lower().replace(" ", "-"),
        "title": title,
        "status": status,
        "detail": detail,
        "errors": [asdict(problem) for problem in problems],
    }
    return JSONResponse(document, status, headers, media_type="application/problem+json")


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(AppError, _on_app_error)
    app.add_exception_handler(InvalidConfig, _on_invalid_config)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def _answer(
    request: Request,
    status: int,
    title: str,
    detail: str,
    problems: Sequence[Problem] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    page: ErrorPage | None = getattr(request.app.state, "error_page", None)
    if page is None or not wants_html(request):
        return problem_response(status, title, detail, problems, headers)
    response = page(request, status, title, detail, list(problems))
    response.headers.update(headers or {})
    return response


def _on_app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    if error.status == 401 and request.method == "GET" and wants_html(request):
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse("/login" if here == "/" else f"/login?next={quote(here, safe='/')}", 303)
    return _answer(request, error.status, error.title, error.detail, error.problems, error.headers)


def _on_invalid_config(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidConfig)
    return _answer(request, 422, Invalid.title, summary_of(error.problems), error.problems)


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem_of(entry) for entry in error.errors()]
    return _answer(request, 422, Invalid.title, summary_of(problems), problems)


def _problem_of(entry: Mapping[str, Any]) -> Problem:
    where = [str(part) for part in entry["loc"] if part not in ("body", "query", "path", "header")]
    value = "missing" if entry["type"] == "missing" else repr(entry.get("input"))[:200]
    return Problem(".".join(where), value, str(entry["msg"]), "see /docs for what this field takes")


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    titles = {404: NotFound.title, 405: "Method not allowed"}
    detail = error.detail if error.status_code != 404 else f"There is nothing at {request.url.path}."
    return _answer(request, error.status_code, titles.get(error.status_code, "Error"), detail, headers=error.headers)


def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(request, 500, AppError.title, "This is a fault of the server; its log holds the details.")
