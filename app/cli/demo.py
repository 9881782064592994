"""`cohort demo`: the house, one run in it, and its progress in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from app.cli.configs import read_config
from app.cli.follow import exit_status, follow, summary
from app.cli.local import passing_token
from app.client import TERMINAL_STATES, CohortClient
from app.launcher import House
from app.settings import Settings
from grpo_engine.config import RunConfig

DEMO_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
INTERRUPTED = 130


def run_demo(settings: Settings, config: Path, seed: int | None, exit_when_done: bool) -> int:
    """Start everything, launch `config` and follow it; the exit status. Without `exit_when_done` it serves on."""
    data = read_config(config) | ({} if seed is None else {"seed": seed})
    console = Console()
    with House(settings, console.print) as house:
        if house.asked_to_stop:
            return INTERRUPTED
        with passing_token(house.settings, "cohort demo") as token, CohortClient(house.url, token) as client:
            run = _unfinished(client, data) or client.start_run(data)
            _greet(console, house, run)
            state = follow(client, run["number"], console, wait=house.wait)
            ended = state.get("state") in TERMINAL_STATES
            if ended:
                console.print(summary(client, state), highlight=False)
        if ended and exit_when_done:
            return exit_status(state)
        if ended:
            console.print(f"The run stays at {house.url}/runs/{run['number']}. Ctrl-C stops everything.")
        house.wait()
        return 0 if ended else INTERRUPTED


def _unfinished(client: CohortClient, data: dict[str, Any]) -> dict[str, Any] | None:
    """The same config's run from an earlier, interrupted demo goes on instead of a second one."""
    try:
        wanted = RunConfig.model_validate(data).hash()
    except ValidationError:
        return None  # the server will say what is wrong with it
    for state in ("running", "starting", "queued"):
        for found in client.runs(state=state):
            run = client.run(found["number"])
            if run["config_hash"] == wanted:
                return run
    return None


def _greet(console: Console, house: House, run: dict[str, Any]) -> None:
    console.print(f"Cohort is at {house.url}. This link signs you in once, within 15 minutes:", soft_wrap=True)
    console.print(house.login_link(), soft_wrap=True, highlight=False)
    console.print(f"Run {run['number']}, “{run['name']}”:", highlight=False)
