"""Python client of the REST API; the `cohort` command uses nothing else for remote work.

client = CohortClient("http://127.0.0.1:8000", token)
run = client.start_run({"name": "try", "model": {...}, "stages": [...]})
for state in client.follow(run["number"]):
    print(state["stage"], state["step"], state["last_reward"])
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from grpo_engine.errors import Problem

TERMINAL_STATES = frozenset({"completed", "failed", "cancelled"})
POST_TRIES = 3
RunRef = int | str
"""A run's number or id."""


class ApiProblem(Exception):
    """The server refused: status, title, detail and, where fields are to blame, their problems."""

    def __init__(self, status: int, title: str, detail: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.problems = list(problems)


class ServerAway(Exception):
    """No answer; the message is a sentence for a person."""


class CohortClient:
    """One server and one token. Raises ApiProblem for refusals and ServerAway when nobody answers."""

    def __init__(
        self, url: str, token: str, *, timeout_s: float = 30, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ------------------------------------------------------------ runs
    def start_run(
        self,
        config: Mapping[str, Any] | str,
        *,
        tags: Sequence[str] = (),
        reward_sources: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Launch a config (a mapping, or YAML text). `reward_sources`: custom reward name -> registered hash."""
        body: dict[str, Any] = {"tags": list(tags), "reward_sources": dict(reward_sources or {})}
        body["config_yaml" if isinstance(config, str) else "config"] = config
        return self._object("POST", "/runs", json=body)

    def run(self, run: RunRef) -> dict[str, Any]:
        return self._object("GET", f"/runs/{run}")

    def runs(self, **filters: str) -> Iterator[dict[str, Any]]:
        """All runs, newest first; `filters` as in GET /runs, such as state="running"."""
        return self._pages("/runs", filters)

    def cancel(self, run: RunRef) -> dict[str, Any]:
        return self._object("POST", f"/runs/{run}/cancel")

    def pause(self, run: RunRef) -> dict[str, Any]:
        return self._object("POST", f"/runs/{run}/pause")

    def resume(self, run: RunRef) -> dict[str, Any]:
        return self._object("POST", f"/runs/{run}/resume")

    def log(self, run: RunRef, *, tail: int = 200) -> dict[str, Any]:
        """Last `tail` lines of the newest attempt's engine log."""
        return self._object("GET", f"/runs/{run}/log", params={"tail": tail})

    def series(self, run: RunRef, names: Sequence[str], *, max_points: int = 1000) -> dict[str, Any]:
        return self._object("GET", f"/runs/{run}/series", params={"names": list(names), "max_points": max_points})

    def evaluations(self, run: RunRef) -> list[dict[str, Any]]:
        return self._items("GET", f"/runs/{run}/evaluations")

    def follow(
        self,
        run: RunRef,
        *,
        interval_s: float = 1.0,
        wait: Callable[[float], object] = time.sleep,
        away_s: float = 60.0,
    ) -> Iterator[dict[str, Any]]:
        """The run each time it changed, until it has ended or `wait` returns True; the last one is the newest state.

        A server that is away (a restart) is waited for up to `away_s` seconds, then ServerAway is raised."""
        seen: object = None
        last_answer = time.monotonic()
        while True:
            try:
                state = self.run(run)
                last_answer = time.monotonic()
                if state["version"] != seen:
                    seen = state["version"]
                    yield state
                if state["state"] in TERMINAL_STATES:
                    return
            except ServerAway:
                if time.monotonic() - last_answer > away_s:
                    raise
            if wait(interval_s) is True:
                return

    # ------------------------------------------------------------ configs, rewards, checkpoints
    def check_config(self, config: Mapping[str, Any] | str) -> dict[str, Any]:
        """The preflight's report: problems, warnings, rendered prompts, memory."""
        key = "config_yaml" if isinstance(config, str) else "config"
        return self._object("POST", "/configs/check", json={key: config})

    def register_reward(self, name: str, source: str) -> str:
        """Register reward source code (needs the `code` permission); returns its hash."""
        return str(self._object("POST", "/rewards", json={"name": name, "source": source})["hash"])

    def rewards(self) -> list[dict[str, Any]]:
        """Every registered version of reward source code, newest first."""
        return self._items("GET", "/rewards")

    def reward(self, name: str, hash: str | None = None) -> dict[str, Any]:
        return self._object("GET", f"/rewards/{name}" + (f"/{hash}" if hash else ""))

    def start_replay(self, run: RunRef, config: Mapping[str, Any], stage: str | None = None) -> dict[str, Any]:
        """Score a run's stored rollouts again by the rewards of `config` (a run's, or only `rewards`)."""
        return self._object("POST", f"/runs/{run}/replays", json={"config": dict(config), "stage": stage})

    def replay(self, run: RunRef, replay_id: str) -> dict[str, Any]:
        """With its summary once the state is completed."""
        return self._object("GET", f"/runs/{run}/replays/{replay_id}")

    def checkpoints(self, run: RunRef) -> Iterator[dict[str, Any]]:
        return self._pages("/checkpoints", {"run": str(run)})

    # ------------------------------------------------------------ requests
    def _pages(self, path: str, filters: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        params = dict(filters)
        while True:
            page = self._object("GET", path, params=params)
            yield from page["items"]
            if not page.get("next_cursor"):
                return
            params["cursor"] = page["next_cursor"]

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._send(method, path, **options).json()
        return answer

    def _items(self, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
        answer = self._send(method, path, **options).json()
        return list(answer["items"] if isinstance(answer, dict) else answer)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        # The same key on every try: a POST whose answer got lost is not carried out twice.
        headers = {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}
        tries = POST_TRIES
        while True:
            tries -= 1
            try:
                response = self._http.request(method, path, headers=headers, **options)
                break
            except httpx.TransportError as error:
                if tries == 0 or isinstance(error, httpx.ConnectError):
                    raise ServerAway(
                        f"Nobody answers at {self.url} ({error}): start it with `cohort up` or correct COHORT_URL."
                    ) from error
        if response.is_error:
            raise _problem(response)
        return response


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        body = response.json()
        problems = [
            Problem(str(entry["field"]), str(entry["value"]), str(entry["message"]), str(entry["remedy"]))
            for entry in body.get("errors", [])
        ]
        return ApiProblem(response.status_code, str(body["title"]), str(body["detail"]), problems)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiProblem(response.status_code, f"HTTP {response.status_code}", response.text[:300])
