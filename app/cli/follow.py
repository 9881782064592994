"""Shows a run's progress in the terminal until it ends: a live bar, or plain lines where output is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.client import CohortClient, RunRef

PLAIN_EVERY_STEPS = 20


def follow(
    client: CohortClient,
    run: RunRef,
    console: Console,
    *,
    interval_s: float = 1.0,
    wait: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """The newest state of the run when it has ended or `wait` returned True."""
    show = _bar if console.is_terminal else _lines
    return show(client, run, console, interval_s, wait)


def exit_status(run: dict[str, Any]) -> int:
    """0 for completed, early stopping included; 1 otherwise."""
    return 0 if run["state"] == "completed" else 1


def summary(client: CohortClient, run: dict[str, Any]) -> str:
    """How the run ended, why, and what its evaluations say from first to last."""
    reason = f" ({run['reason']})" if run.get("reason") else ""
    message = f": {run['message']}" if run.get("message") else "."
    lines = [f"Run {run['number']} is {run['state']}{reason}{message}"]
    evaluations = client.evaluations(run["number"])
    last_stage = [e for e in evaluations if evaluations and e["stage"] == evaluations[-1]["stage"]]
    if len(last_stage) > 1:
        first, last = last_stage[0], last_stage[-1]
        for name in sorted(set(first["metrics"]) & set(last["metrics"])):
            before, after = first["metrics"][name], last["metrics"][name]
            lines.append(f"  {name.replace('_', ' ')}: {_number(before)} → {_number(after)}")
    return "\n".join(lines)


def _bar(
    client: CohortClient, run: RunRef, console: Console, interval_s: float, wait: Callable[[float], object]
) -> dict[str, Any]:
    columns = (
        TextColumn("[bold]run {task.fields[number]}[/] {task.fields[state]:<9}"),
        BarColumn(),
        TextColumn("{task.fields[stage]:<6} {task.fields[steps]}"),
        TextColumn("reward {task.fields[reward]:>6}  accuracy {task.fields[accuracy]:>6}"),
        TimeElapsedColumn(),
    )
    state: dict[str, Any] = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("run", total=None, number=run, state="", stage="", steps="", reward="–", accuracy="–")
        for state in client.follow(run, interval_s=interval_s, wait=wait):
            progress.update(task, completed=state["steps_done"], total=state["total_steps"], **_fields(client, state))
    return state


def _lines(
    client: CohortClient, run: RunRef, console: Console, interval_s: float, wait: Callable[[float], object]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    shown: tuple[object, ...] = ()
    for state in client.follow(run, interval_s=interval_s, wait=wait):
        key = (state["state"], state["stage"], state["steps_done"] // PLAIN_EVERY_STEPS)
        if key != shown:
            shown = key
            now = _fields(client, state)
            console.print(
                f"run {now['number']}  {now['state']:<9}  {now['stage']:<6}  "
                f"{now['steps']}  reward {now['reward']}  accuracy {now['accuracy']}",
                highlight=False,
            )
    return state


def _fields(client: CohortClient, run: dict[str, Any]) -> dict[str, Any]:
    evaluations = client.evaluations(run["number"]) if run["stage"] else []
    accuracy = evaluations[-1]["metrics"].get("accuracy_greedy") if evaluations else None
    return {
        "number": run["number"],
        "state": run["state"],
        "stage": run["stage"] or "",
        "steps": f"{run['steps_done']}/{run['total_steps']}",
        "reward": _number(run["last_reward"]),
        "accuracy": _number(accuracy),
    }


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"
