"""`cohort rewards …`: one's own reward functions, and stored rollouts scored again; all over REST."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from app.cli.configs import read_config
from app.cli.failures import CliError
from app.cli.local import client
from app.client import CohortClient

rewards_cli = typer.Typer(help="Reward functions, and replays of stored rollouts.", no_args_is_help=True)
ENDED = ("completed", "failed")


@rewards_cli.command("register")
def register(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python source of one reward function.")],
    name: Annotated[str | None, typer.Option(help="Name; the file's without its ending when not given.")] = None,
) -> None:
    """Register a reward function; configs then name it as kind custom."""
    try:
        source = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"Cannot read the reward {file}: {error}.") from error
    with client() as server:
        digest = server.register_reward(name or file.stem, source)
    print(f"{name or file.stem} is registered as {digest[:10]}.")


@rewards_cli.command("list")
def list_rewards() -> None:
    """List registered reward functions, newest first."""
    table = Table("name", "hash", "registered", box=None)
    with client() as server:
        for row in server.rewards():
            table.add_row(row["name"], row["hash"][:10], row["created_at"][:19].replace("T", " "))
    if table.row_count:
        Console().print(table)
    else:
        print("There is no reward function yet; `cohort rewards register FILE` registers one.")


@rewards_cli.command("show")
def show(
    name: Annotated[str, typer.Argument()],
    hash: Annotated[str | None, typer.Option(help="A version by its hash; the newest when not given.")] = None,
) -> None:
    """Print a registered function's source."""
    with client() as server:
        print(server.reward(name, hash)["source"], end="")


@rewards_cli.command("replay")
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Number or id of the run.")],
    config: Annotated[Path, typer.Option("-f", "--config", help="A run config, or only its rewards; YAML.")],
    stage: Annotated[str | None, typer.Option(help="Stage whose rollouts are meant, such as 1-rl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole summary as JSON.")] = False,
) -> None:
    """Score a run's stored rollouts again by other rewards, and say what would have changed."""
    with client() as server:
        row = follow(server, run, server.start_replay(run, read_config(config), stage))
    if row["state"] == "failed":
        raise CliError(row["message"])
    print(json.dumps(row["summary"], ensure_ascii=False) if as_json else "\n".join(lines(row["summary"])))
    if not as_json:
        print(f"{server.url}/runs/{run}/replays/{row['id']}")


def follow(
    server: CohortClient, run: str, row: dict[str, Any], wait: Callable[[float], object] = time.sleep
) -> dict[str, Any]:
    """The replay once it has ended."""
    while row["state"] not in ENDED:
        wait(1.0)
        row = server.replay(run, row["id"])
    return row


def lines(told: Mapping[str, Any]) -> list[str]:
    """A summary for people, a line a figure."""
    correlated = f"over {told['num_correlated']:,} groups with variance before and after"
    found = [
        f"{told['num_completions']:,} completions in {told['num_groups']:,} groups of {told['stage']} scored again",
        f"rank correlation within groups  {_text(told['rank_correlation'])}  ({correlated})",
        f"advantages that change sign     {told['sign_changed_share']:.1%}",
        f"best completion is another      {told['best_changed_share']:.1%} of groups",
        f"mean reward                     {_text(told['old_mean_reward'])} → {_text(told['new_mean_reward'])}",
    ]
    for name, part in told["parts"].items():
        found.append(f"  {name:<29} {_text(part['old_mean'])} → {_text(part['new_mean'])}")
    return found


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
