"""What commands on this machine's own home share: its settings, its database, a client with a passing token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session

from app.cli.failures import CliError
from app.client import CohortClient
from app.db import Database
from app.launcher import address_of
from app.migrate import upgrade
from app.settings import Settings, get_settings
from app.users import service as users


@contextmanager
def local_database(settings: Settings) -> Iterator[Database]:
    """The home's database, migrated first."""
    upgrade(settings)
    database = Database(settings.resolved_database_url)
    try:
        yield database
    finally:
        database.dispose()


@contextmanager
def local_session(settings: Settings | None = None) -> Iterator[Session]:
    """A writing transaction on the home's database; committed at the end."""
    with local_database(settings or get_settings()) as database, database.write() as session:
        yield session


@contextmanager
def passing_token(settings: Settings, purpose: str) -> Iterator[str]:
    """A token of the first local user that is revoked at the end."""
    with local_session(settings) as session:
        user = users.ensure_first_user(session)
        row, token = users.create_token(session, user, f"{purpose} (process {os.getpid()})")
    try:
        yield token
    finally:
        with local_session(settings) as session:
            users.revoke_token(session, user, row.id)


@contextmanager
def client() -> Iterator[CohortClient]:
    """COHORT_URL and COHORT_TOKEN when set; else the local home's server with a token made for this command."""
    settings = get_settings()
    url, token = os.environ.get("COHORT_URL", ""), os.environ.get("COHORT_TOKEN", "")
    if url and not token:
        raise CliError(
            f"COHORT_URL is {url} but COHORT_TOKEN is not set: make one there with `cohort token create NAME`."
        )
    if token:
        with CohortClient(url or address_of(settings), token) as remote:
            yield remote
        return
    if not settings.database_url and not (settings.home / "cohort.db").exists():
        raise CliError(
            f"There is no Cohort in {settings.home.resolve()}: start one with `cohort up`, set COHORT_HOME to its "
            "home, or COHORT_URL and COHORT_TOKEN for one elsewhere."
        )
    with passing_token(settings, "cohort command") as own, CohortClient(address_of(settings), own) as local:
        yield local
