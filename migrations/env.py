"""Alembic's entry: the URL of app.settings (or of app.migrate), the tables of app.models, batch mode for SQLite."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import create_engine, pool

from app.models import Base
from app.models.base import UTCDateTime
from app.settings import get_settings

LOCK_TIMEOUT = "SET LOCAL lock_timeout = '5s'"


def database_url() -> str:
    return context.config.get_main_option("sqlalchemy.url") or get_settings().resolved_database_url


def render_item(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Migrations name plain types, so that they outlive the application's code."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UTCDateTime) else False


def run() -> None:
    engine = create_engine(database_url(), poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_as_batch=connection.dialect.name == "sqlite",
            render_item=render_item,
            compare_type=True,
            compare_server_default=True,
        )
        with context.begin_transaction():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(LOCK_TIMEOUT)
            context.run_migrations()
    engine.dispose()


if context.is_offline_mode():
    raise SystemExit("migrations need a database; offline SQL is not supported")
run()
