"""What a request works with: its database session, settings, artifact store; and what happens after its commit.

One request is one transaction. `WriteSession` commits after the endpoint returned and before the answer is sent,
together with the answer's idempotency record; raising rolls back. Services flush and never commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from fastapi import Depends, Request
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app import idempotency
from app.artifacts import ArtifactStore
from app.broker import send_work
from app.db import Database
from app.errors import Conflict
from app.settings import Settings

logger = logging.getLogger(__name__)
_SENDER = "send_work"


def get_database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def get_app_settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def get_store(request: Request) -> ArtifactStore:
    store: ArtifactStore = request.app.state.store
    return store


AppDatabase = Annotated[Database, Depends(get_database)]
AppSettings = Annotated[Settings, Depends(get_app_settings)]
AppStore = Annotated[ArtifactStore, Depends(get_store)]


def read_session(database: AppDatabase) -> Iterator[Session]:
    with database.read() as session:
        yield session


def write_session(request: Request, database: AppDatabase, settings: AppSettings) -> Iterator[Session]:
    """Raises Conflict when two requests made the same thing at once and this one came second."""
    try:
        with idempotency.one_answer(request), database.write() as session:
            session.info[_SENDER] = lambda: send_work(settings)
            yield session
            idempotency.remember(request, session)
    except IntegrityError as error:
        raise Conflict("Another request made the same thing at the same moment; look again and repeat.") from error


ReadSession = Annotated[Session, Depends(read_session, scope="function")]
WriteSession = Annotated[Session, Depends(write_session, scope="function")]


def announce_work(session: Session) -> None:
    """Tell the workers after the commit that a run is queued. Outside a request nothing is sent: the reaper will."""
    sender = session.info.get(_SENDER)
    if sender is not None:
        after_commit(session, sender)


def after_commit(session: Session, work: Callable[[], object]) -> None:
    """Call `work` once the session's transaction is committed, and never if it rolls back.

    Its failure is logged only: what it announces is in the database, and the reaper announces it again."""

    def run(_: Any) -> None:
        try:
            work()
        except Exception:
            logger.warning("after-commit work failed", exc_info=True)

    event.listen(session, "after_commit", run, once=True)
