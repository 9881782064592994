"""`cohort token` and `cohort user`, directly on the local home's database."""

from __future__ import annotations

from typing import Annotated

import typer
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.cli.failures import CliError
from app.cli.local import local_session
from app.models import User
from app.users import service as users

token_cli = typer.Typer(help="API tokens of the local home.", no_args_is_help=True)
user_cli = typer.Typer(help="Users of the local home.", no_args_is_help=True)

UserOption = Annotated[str | None, typer.Option("--user", help="Whose; the first local user when not given.")]
PasswordOption = Annotated[
    str, typer.Option(prompt=True, hide_input=True, confirmation_prompt=True, help="Asked for when not given.")
]


@token_cli.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="What you will know it by.")], user: UserOption = None
) -> None:
    """Print a new API token. It is shown once; give it to programs as COHORT_TOKEN."""
    with local_session() as session:
        _, token = users.create_token(session, _user(session, user), name)
    print(token)


@user_cli.command("create")
def create_user(
    name: Annotated[str, typer.Argument()],
    permission: Annotated[list[str] | None, typer.Option(help="read, run, code, admin; may be repeated.")] = None,
    password: PasswordOption = "",
) -> None:
    """Create a user, by default with the permissions read and run."""
    with local_session() as session:
        users.ensure_first_user(session)
        users.create_user(session, name, permission or ["read", "run"], password)
    print(f"Created the user {name}.")


@user_cli.command("password")
def set_password(name: Annotated[str, typer.Argument()], password: PasswordOption = "") -> None:
    """Set a user's password; it ends every session of theirs."""
    with local_session() as session:
        users.set_password(session, _user(session, name), password)
    print(f"The password of {name} is set.")


def _user(session: Session, name: str | None) -> User:
    first = users.ensure_first_user(session)
    if name is None:
        return first
    user = session.scalar(select(User).where(User.name == name))
    if user is None:
        raise CliError(f"There is no user {name}: create one with `cohort user create {name}`.")
    return user
