from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.util import CommandError
from sqlalchemy import create_engine, inspect

from app.db import Database
from app.migrate import alembic_config, upgrade
from app.models import Base
from app.settings import Settings
from tests import seed


def tables(settings: Settings) -> set[str]:
    engine = create_engine(settings.resolved_database_url)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    return names - {"alembic_version"}


def test_migrations_make_every_table_and_take_it_away_again(any_settings: Settings) -> None:
    assert tables(any_settings) == set(Base.metadata.tables)
    command.downgrade(alembic_config(any_settings.resolved_database_url), "base")
    assert tables(any_settings) == set()
    upgrade(any_settings)
    assert tables(any_settings) == set(Base.metadata.tables)


def test_migrations_say_the_same_as_the_models(any_settings: Settings) -> None:
    command.check(alembic_config(any_settings.resolved_database_url))


def test_the_check_notices_a_model_without_migration(settings: Settings) -> None:
    engine = create_engine(settings.resolved_database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE runs DROP COLUMN message")
    engine.dispose()
    with pytest.raises(CommandError, match="New upgrade operations"):
        command.check(alembic_config(settings.resolved_database_url))


def test_migrating_twice_changes_nothing(any_settings: Settings, any_database: Database) -> None:
    run = seed.failed_run(any_database, any_settings)
    upgrade(any_settings)
    with any_database.read() as session:
        assert session.get_one(type(run), run.id).state == "failed"


def test_a_home_that_is_not_there_is_made(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "new" / "home")
    upgrade(settings)
    assert "runs" in tables(settings)
