"""Brings the database to the newest schema: a thin call of Alembic on migrations/."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

from app.settings import Settings

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def alembic_config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def upgrade(settings: Settings, revision: str = "head") -> None:
    """Migrate the database of `settings`, making the home and the database when they are missing."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command.upgrade(alembic_config(settings.resolved_database_url), revision)
