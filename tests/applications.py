"""Applications that share their routes: those take a third of a second to make and know no home."""

from __future__ import annotations

from copy import copy

from fastapi import FastAPI
from starlette.datastructures import State

from app.artifacts import open_store
from app.db import Database
from app.main import create_app
from app.security import load_secret_key
from app.settings import Settings

_first: list[FastAPI] = []
"""The one whose routes the others share; it serves nothing itself."""


def application(settings: Settings) -> FastAPI:
    """As `create_app(settings)`: a state of its own, routes of the first application that this process made."""
    if not _first:
        _first.append(create_app(settings))
        _first[0].state.database.dispose()
    made = copy(_first[0])
    made.state = State(
        {name: _first[0].state[name] for name in _first[0].state}
        | {
            "settings": settings,
            "database": Database(settings.resolved_database_url),
            "store": open_store(settings),
            "secret_key": load_secret_key(settings),
        }
    )
    return made
