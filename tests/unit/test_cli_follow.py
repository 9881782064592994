"""Progress in the terminal, from a server of a few lines."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from app.cli.follow import exit_status, follow, summary
from app.client import CohortClient

EVALUATIONS = [
    {"stage": "1-rl", "step": 0, "metrics": {"accuracy_greedy": 0.2, "mean_length_tokens": 7}},
    {"stage": "1-rl", "step": 60, "metrics": {"accuracy_greedy": 0.98, "mean_length_tokens": 33.5}},
]


def run(version: int, state: str, steps: int, **more: Any) -> dict[str, Any]:
    progress = {"steps_done": steps, "total_steps": 60, "last_reward": 0.5 if steps else None}
    return {"number": 4, "version": version, "state": state, "stage": "1-rl" if steps else None} | progress | more


def server(*states: dict[str, Any]) -> CohortClient:
    answers = iter(states)

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/evaluations"):
            return httpx.Response(200, json={"items": EVALUATIONS})
        return httpx.Response(200, json=next(answers))

    return CohortClient("http://cohort.test", "t", transport=httpx.MockTransport(handler))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_stage_steps_reward_and_accuracy(terminal: bool) -> None:
    output = io.StringIO()
    states = run(1, "queued", 0), run(2, "running", 30), run(3, "completed", 60)
    console = Console(file=output, force_terminal=terminal, width=160, color_system=None)
    last = follow(server(*states), 4, console, wait=lambda _: None)
    assert last["state"] == "completed"
    for part in ("run 4", "completed", "1-rl", "60/60", "0.5", "0.98"):
        assert part in output.getvalue()


def test_plain_lines_are_few() -> None:
    output = io.StringIO()
    states = [run(version, "running", version) for version in range(1, 60)] + [run(60, "completed", 60)]
    follow(server(*states), 4, Console(file=output, force_terminal=False, width=160), wait=lambda _: None)
    assert len(output.getvalue().splitlines()) == 4


def test_the_summary_says_how_it_ended_and_what_was_learned() -> None:
    text = summary(server(), run(3, "completed", 60, reason="early_stopped", message="The reward stopped rising."))
    assert text.splitlines() == [
        "Run 4 is completed (early_stopped): The reward stopped rising.",
        "  accuracy greedy: 0.2 → 0.98",
        "  mean length tokens: 7 → 33.5",
    ]


@pytest.mark.parametrize(("state", "status"), [("completed", 0), ("failed", 1), ("cancelled", 1), ("running", 1)])
def test_only_a_completed_run_ends_with_0(state: str, status: int) -> None:
    assert exit_status({"state": state}) == status
