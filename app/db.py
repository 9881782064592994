"""Database access: one engine a process, three kinds of transaction.

read()   a snapshot; never writes
write()  state changes; on SQLite BEGIN IMMEDIATE and synchronous=FULL
ingest() journal rows; on SQLite BEGIN IMMEDIATE and synchronous=NORMAL (lost rows are ingested again)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker

BUSY_TIMEOUT_S = 30


class Database:
    """Sessions on one database URL. Safe to share between threads, never across a fork."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        self._durable = _make_engine(url, "FULL", immediate=True)
        self._relaxed = _make_engine(url, "NORMAL", immediate=True) if self.is_sqlite else self._durable
        self._reading = _make_engine(url, "NORMAL", immediate=False) if self.is_sqlite else self._durable

    @property
    def engine(self) -> Engine:
        return self._durable

    def read(self) -> AbstractContextManager[Session]:
        return _transaction(self._reading)

    def write(self) -> AbstractContextManager[Session]:
        return _transaction(self._durable)

    def ingest(self) -> AbstractContextManager[Session]:
        return _transaction(self._relaxed)

    def dispose(self) -> None:
        for engine in (self._durable, self._relaxed, self._reading):
            engine.dispose()


@contextmanager
def _transaction(engine: Engine) -> Iterator[Session]:
    with sessionmaker(engine, expire_on_commit=False).begin() as session:
        yield session


def _make_engine(url: str, synchronous: str, *, immediate: bool) -> Engine:
    if not url.startswith("sqlite"):
        # A process frozen inside a transaction must not hold its locks against the rest of the house.
        options = f"-c idle_in_transaction_session_timeout={BUSY_TIMEOUT_S * 1000}"
        return create_engine(url, pool_pre_ping=True, connect_args={"options": options})
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        wait = f"busy_timeout={BUSY_TIMEOUT_S * 1000}"
        for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON", wait):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
