"""`cohort run …`: over REST, but for `import`, which works on the local home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from app.cli.configs import named_file, read_config
from app.cli.failures import CliError
from app.cli.follow import exit_status, summary
from app.cli.follow import follow as follow_run
from app.cli.local import client, local_database
from app.client import TERMINAL_STATES, CohortClient
from app.runs.importing import import_run
from app.settings import get_settings
from app.users import service as users

run_cli = typer.Typer(help="Launch, watch and control runs.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Number or id of the run.")]


@run_cli.command("start")
def start(
    file: Annotated[Path, typer.Option("-f", "--file", help="Config, YAML.")],
    reward: Annotated[list[str] | None, typer.Option(help="[NAME=]FILE of a custom reward; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run instead of the config's.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag; may be repeated.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show progress; end with the run's status.")] = False,
) -> None:
    """Launch a config."""
    data = read_config(file) | ({} if name is None else {"name": name})
    sources = [_reward(pair) for pair in reward or ()]
    with client() as server:
        hashes = {reward_name: server.register_reward(reward_name, source) for reward_name, source in sources}
        run = server.start_run(data, tags=tag or (), reward_sources=hashes)
        print(f"Run {run['number']} is {run['state']}: {server.url}/runs/{run['number']}")
        if follow:
            raise typer.Exit(_follow(server, run["number"]))


@run_cli.command("list")
def list_runs(
    state: Annotated[str | None, typer.Option(help="Only runs in this state.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many, newest first.", min=1)] = 50,
) -> None:
    """List runs, newest first."""
    table = Table("run", "name", "state", "progress", "reward", "tags", box=None)
    with client() as server:
        for count, run in enumerate(server.runs(**({} if state is None else {"state": state}))):
            if count == limit:
                break
            progress, tags = f"{run['steps_done']}/{run['total_steps']}", " ".join(run["tags"])
            table.add_row(str(run["number"]), run["name"], run["state"], progress, _reward_text(run), tags)
    if table.row_count:
        Console().print(table)
    else:
        print("There are no runs yet; `cohort run start -f configs/demo.yaml` launches one.")


@run_cli.command("show")
def show(run: RunArgument) -> None:
    """Show a run's state, progress and checkpoints."""
    with client() as server:
        state = server.run(run)
        checkpoints = list(server.checkpoints(run))
        print(summary(server, state))
    print(f"  name: {state['name']}")
    print(f"  steps: {state['steps_done']}/{state['total_steps']}, stage {state['stage'] or '–'}")
    print(f"  last reward: {_reward_text(state)}")
    for checkpoint in checkpoints:
        place = f"{checkpoint['stage']}, step {checkpoint['step']}, {checkpoint['state']}"
        print(f"  checkpoint: {place}: {server.url}/checkpoints/{checkpoint['id']}")


@run_cli.command("follow")
def follow_command(run: RunArgument) -> None:
    """Follow a run until it ends; ends with its status."""
    with client() as server:
        raise typer.Exit(_follow(server, server.run(run)["number"]))


@run_cli.command("cancel")
def cancel(run: RunArgument) -> None:
    """Cancel a run; what it has trained stays."""
    with client() as server:
        _say(server.cancel(run))


@run_cli.command("pause")
def pause(run: RunArgument) -> None:
    """Write a checkpoint and free the device; `resume` continues on any worker."""
    with client() as server:
        _say(server.pause(run))


@run_cli.command("resume")
def resume(run: RunArgument) -> None:
    """Queue a paused run again."""
    with client() as server:
        _say(server.resume(run))


@run_cli.command("logs")
def logs(run: RunArgument, tail: Annotated[int, typer.Option(help="Last lines.", min=1)] = 200) -> None:
    """Print the last lines of the engine's log."""
    with client() as server:
        print(server.log(run, tail=tail)["text"], end="")


@run_cli.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder made by `python -m grpo_engine run`.")],
) -> None:
    """Take a run that was made without the web into the local home."""
    settings = get_settings()
    with local_database(settings) as database:
        with database.write() as session:
            owner = users.ensure_first_user(session)
        run = import_run(settings, database, folder, owner)
    print(f"Imported as run {run.number}, {run.state} after {run.steps_done} steps.")


def _follow(server: CohortClient, number: int) -> int:
    state = follow_run(server, number, Console())
    if state["state"] in TERMINAL_STATES:
        print(summary(server, state))
    return exit_status(state)


def _reward(pair: str) -> tuple[str, str]:
    name, path = named_file(pair)
    try:
        return name, path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"Cannot read the reward {path}: {error}.") from error


def _say(run: dict[str, Any]) -> None:
    print(f"Run {run['number']} is {run['state']}.")


def _reward_text(run: dict[str, Any]) -> str:
    return "–" if run["last_reward"] is None else f"{run['last_reward']:.3f}"
