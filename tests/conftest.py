"""Fixtures that many tests share: a migrated database (SQLite, PostgreSQL), settings, the application, callers."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.db import Database
from app.migrate import upgrade
from app.settings import Settings
from tests import seed
from tests.applications import application
from tests.callers import bearer
from tests.postgres import PostgresServer
from tests.typed import typed

__all__ = ["typed"]

# A worker's self-test takes seconds of both cores; tests/integration/test_sandbox_worker.py has it.
os.environ.setdefault("COHORT_SANDBOX_CHECK", "false")

# Cases are the same on every machine, and a loaded one may take its time.
hypothesis.settings.register_profile("cohort", deadline=None, derandomize=True)
hypothesis.settings.load_profile("cohort")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported by then, half a million objects, stays to the end: the collector need not look at it again."""
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly migrated SQLite file, to be copied."""
    home = tmp_path_factory.mktemp("template")
    upgrade(Settings(home=home))
    return home / "cohort.db"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a freshly migrated database, to be copied."""
    name = postgres.create()
    upgrade(Settings(home=tmp_path_factory.mktemp("postgres"), database_url=postgres.url(name)))
    return name


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    """A home of its own with a migrated SQLite database."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(sqlite_template, home / "cohort.db")
    return Settings(home=home)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    opened = Database(settings.resolved_database_url)
    yield opened
    opened.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def any_settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """`settings` on SQLite and on PostgreSQL in turn."""
    if request.param == "sqlite":
        return settings
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.create(request.getfixturevalue("postgres_template"))
    return settings.model_copy(update={"database_url": server.url(name)})


@pytest.fixture
def any_database(any_settings: Settings) -> Iterator[Database]:
    opened = Database(any_settings.resolved_database_url)
    yield opened
    opened.dispose()


@pytest.fixture
def app(settings: Settings) -> Iterator[FastAPI]:
    made = application(settings)
    yield made
    made.state.database.dispose()


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    """Nobody."""
    with TestClient(app) as client:
        yield client


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    """The first local user, by bearer token."""
    with TestClient(app, headers=bearer(app)) as client:
        yield client


@pytest.fixture(scope="session")
def seeded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a finished run (1), a running one (2) and a failed one (3); to be copied, never changed."""
    settings = Settings(home=tmp_path_factory.mktemp("seeded") / "home")
    upgrade(settings)
    database = Database(settings.resolved_database_url)
    seed.finished_run(database, settings)
    seed.running_run(database, settings)
    seed.failed_run(database, settings)
    database.dispose()
    return settings.home


@pytest.fixture
def seeded_settings(tmp_path: Path, seeded_home: Path) -> Settings:
    """A copy of the seeded home."""
    shutil.copytree(seeded_home, tmp_path / "seeded")
    return Settings(home=tmp_path / "seeded")


@pytest.fixture
def seeded_app(seeded_settings: Settings) -> Iterator[FastAPI]:
    made = application(seeded_settings)
    yield made
    made.state.database.dispose()


@pytest.fixture
def seeded(seeded_app: FastAPI) -> Iterator[TestClient]:
    """The first local user on the seeded home."""
    with TestClient(seeded_app, headers=bearer(seeded_app)) as client:
        yield client


@pytest.fixture
def any_client(any_settings: Settings) -> Iterator[TestClient]:
    """The first local user of an empty application, on SQLite and on PostgreSQL in turn."""
    app = application(any_settings)
    with TestClient(app, headers=bearer(app)) as client:
        yield client


@pytest.fixture(scope="session")
def one_run_home(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one finished run in SQLite; to be copied, never changed."""
    home = tmp_path_factory.mktemp("one-run") / "home"
    home.mkdir()
    shutil.copy(sqlite_template, home / "cohort.db")
    return _with_one_run(Settings(home=home))


@pytest.fixture(scope="session")
def one_run_in_postgres(
    postgres: PostgresServer, postgres_template: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The same in PostgreSQL: the home, and the name of a database to be copied."""
    name = postgres.create(postgres_template)
    home = tmp_path_factory.mktemp("one-run-postgres") / "home"
    return _with_one_run(Settings(home=home, database_url=postgres.url(name))), name


def _with_one_run(settings: Settings) -> Path:
    database = Database(settings.resolved_database_url)
    seed.finished_run(database, settings)
    database.dispose()
    return settings.home


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def any_seeded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    """The first local user with one finished run, on SQLite and on PostgreSQL in turn."""
    settings = Settings(home=tmp_path / "any-seeded")
    if request.param == "sqlite":
        home: Path = request.getfixturevalue("one_run_home")
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        home, name = request.getfixturevalue("one_run_in_postgres")
        settings = settings.model_copy(update={"database_url": server.url(server.create(name))})
    shutil.copytree(home, settings.home)
    app = application(settings)
    with TestClient(app, headers=bearer(app)) as client:
        yield client
