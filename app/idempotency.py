"""Idempotency-Key: a repeated POST with the same key and body gets the first answer and does nothing again.

The record is written in the transaction of the work itself, so there is never one without the other. A POST that only
computes (a config check) records its answer in a transaction of its own. A secret shown once (a new token) is not kept:
its repeat answers with null in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app.db import Database
from app.errors import BadRequest, Conflict, Invalid
from app.models import IdempotencyKey, User
from grpo_engine.errors import Problem

HEADER = "Idempotency-Key"
SECRET_FIELDS = ("token", "secret", "url")


class Replayed(Exception):
    """The request was answered before; carries that answer."""

    def __init__(self, status: int, body: dict[str, Any] | None) -> None:
        super().__init__(status)
        self.response = JSONResponse(body, status, {"Idempotency-Replayed": "true"})


class ApiRoute(APIRoute):
    """Route class of every API router: keeps the answer of a POST for `remember`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if request.method != "POST" or HEADER not in request.headers:
                return await handle(request)
            request.state.request_hash = await _request_hash(request)
            try:
                response = await handle(request)
            except Replayed as replayed:
                return replayed.response
            if response.status_code < 300:
                request.state.answer = (response.status_code, _json_body(response))
                if not hasattr(request.state, "in_transaction"):
                    await run_in_threadpool(_remember_alone, request)
            return response

        return answer


async def _request_hash(request: Request) -> str:
    digest = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query}\n".encode())
    digest.update(await request.body())
    return digest.hexdigest()


def _json_body(response: Response) -> dict[str, Any] | None:
    if not response.body or "json" not in response.headers.get("content-type", ""):
        return None
    body = json.loads(bytes(response.body))
    return {name: None if name in SECRET_FIELDS else value for name, value in body.items()}


def replay_known(request: Request, session: Session, user: User) -> None:
    """Raise Replayed when `user` sent this key before with the same body, Invalid when with another body.

    Called as soon as the caller is known, before anything is done."""
    request.state.caller_id = user.id
    key = request.headers.get(HEADER)
    if request.method != "POST" or key is None:
        return
    if not 1 <= len(key) <= 200:
        raise BadRequest(f"{HEADER} has {len(key)} characters; use 1 to 200, such as a UUID.")
    query = select(IdempotencyKey).where(IdempotencyKey.user_id == user.id, IdempotencyKey.key == key)
    known = session.scalar(query)
    if known is None:
        return
    if known.request_hash != getattr(request.state, "request_hash", None):
        problem = Problem(HEADER, key, "was used for another request", "send a new key with every new request")
        raise Invalid.of([problem])
    raise Replayed(known.status, known.body)


@contextmanager
def one_answer(request: Request) -> Iterator[None]:
    """Around a writing transaction: when a twin with the same key committed first, this one is undone and told so."""
    request.state.in_transaction = True
    try:
        yield
    except IntegrityError as error:
        if "idempotency_keys" not in str(error.orig):
            raise
        raise Conflict("A request with this Idempotency-Key is being answered; ask again.") from error


def remember(request: Request, session: Session) -> None:
    """Add the answer's record to the transaction. Does nothing without a key."""
    answer = getattr(request.state, "answer", None)
    caller = getattr(request.state, "caller_id", None)
    if answer is None or caller is None:
        return
    status, body = answer
    key = request.headers[HEADER]
    record = IdempotencyKey(user_id=caller, key=key, request_hash=request.state.request_hash, status=status, body=body)
    session.add(record)
    session.flush()


def _remember_alone(request: Request) -> None:
    database: Database = request.app.state.database
    with one_answer(request), database.write() as session:
        remember(request, session)
