"""Buttons of a run: pause, resume, cancel, early stopping, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Form
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.errors import Conflict, Invalid
from app.models import Run, User
from app.runs import service
from app.security import Runner
from app.sessions import AppDatabase, AppStore, WriteSession
from app.web import pages_router, redirect
from grpo_engine.errors import Problem

router = pages_router()


@router.post("/runs/{number}/pause")
def pause(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.pause, user, session, number, "The run saves a checkpoint and frees its device.")


@router.post("/runs/{number}/resume")
def resume(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.resume, user, session, number, "The run is queued again.")


@router.post("/runs/{number}/cancel")
def cancel(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.cancel, user, session, number, "The run is being cancelled.")


def _steered(
    act: Callable[[Session, Run, User], Run], user: User, session: Session, number: str, words: str
) -> Response:
    run = service.get_run(session, number)
    try:
        act(session, run, user)
    except Conflict as error:
        return redirect(f"/runs/{number}", error.detail, "warn")
    return redirect(f"/runs/{number}", words)


@router.post("/runs/{number}/early-stopping")
def early_stopping(user: Runner, session: WriteSession, number: str, mode: Annotated[str, Form()]) -> Response:
    run = service.get_run(session, number)
    if mode not in ("off", "observe", "stop"):
        raise Invalid.of([Problem("mode", mode[:40], "is no mode of early stopping", "use off, observe or stop")])
    try:
        service.set_early_stopping(session, run, user, mode)
    except Conflict as error:
        return redirect(f"/runs/{number}", error.detail, "warn")
    words = {
        "off": "Early stopping is off.",
        "observe": "Early stopping only observes.",
        "stop": "Early stopping may stop the run.",
    }
    return redirect(f"/runs/{number}", words[mode])


@router.post("/runs/{number}/delete")
def delete(_: Runner, database: AppDatabase, store: AppStore, number: str) -> Response:
    with database.read() as session:
        run = service.get_run(session, number)
        service.check_deletable(session, run)
    service.remove_files(store, run)  # may take long; nobody waits for the database meanwhile
    with database.write() as session:
        service.delete_run(session, run)
    return redirect("/runs", f"Run #{number}, {run.name}, is deleted.")
