"""The REST client against a server of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.client import ApiProblem, CohortClient, ServerAway

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> CohortClient:
    return CohortClient("http://cohort.test/", "cht_secret", transport=httpx.MockTransport(handler))


def run(version: int, state: str = "running") -> dict[str, Any]:
    return {"number": 1, "version": version, "state": state}


def test_requests_carry_the_token_and_go_to_the_api() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer cht_secret"
        return httpx.Response(200, json={"path": request.url.path})

    assert client_of(handler).run(7) == {"path": "/api/v1/runs/7"}


def test_yaml_text_and_mappings_are_sent_as_what_they_are() -> None:
    bodies: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(201, json=run(0))

    client_of(handler).start_run("name: try")
    client_of(handler).start_run({"name": "try"})
    assert b'"config_yaml":"name: try"' in bodies[0]
    assert b'"config":{"name":"try"}' in bodies[1]


def test_a_post_whose_answer_was_lost_is_repeated_under_the_same_key() -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            raise httpx.ReadError("cut off", request=request)
        return httpx.Response(200, json=run(1, "cancelling"))

    assert client_of(handler).cancel(1)["state"] == "cancelling"
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_different_posts_have_different_keys() -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(200, json=run(1))

    client = client_of(handler)
    client.pause(1)
    client.pause(1)
    assert len(set(keys)) == 2


def test_a_problem_document_becomes_an_error_with_its_problems() -> None:
    entry = {"field": "stages.0.group_size", "value": "1", "message": "must be at least 2", "remedy": "use 2"}
    body = {"title": "Invalid input", "detail": "1 problem", "status": 422, "errors": [entry]}
    with pytest.raises(ApiProblem) as caught:
        client_of(lambda _: httpx.Response(422, json=body)).start_run({})
    assert caught.value.status == 422
    assert str(caught.value.problems[0]) == "stages.0.group_size = 1: must be at least 2; use 2"


def test_an_answer_that_is_no_problem_document_is_still_an_error() -> None:
    with pytest.raises(ApiProblem, match="HTTP 502: <html>"):
        client_of(lambda _: httpx.Response(502, text="<html>")).run(1)


def test_a_server_that_is_away_is_named_with_a_remedy() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ServerAway, match=r"http://cohort\.test .*cohort up"):
        client_of(handler).run(1)


def test_lists_go_through_all_pages() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        cursor = request.url.params.get("cursor")
        assert request.url.params["state"] == "queued"
        pages = {None: ([1, 2], "b"), "b": ([3], None)}
        numbers, following = pages[cursor]
        return httpx.Response(200, json={"items": [{"number": n} for n in numbers], "next_cursor": following})

    assert [found["number"] for found in client_of(handler).runs(state="queued")] == [1, 2, 3]


def test_following_yields_each_version_once_and_ends_with_the_run() -> None:
    answers = iter([run(1), run(1), run(2), run(3, "completed")])
    client = client_of(lambda _: httpx.Response(200, json=next(answers)))
    assert [state["version"] for state in client.follow(1, wait=lambda _: None)] == [1, 2, 3]


def test_following_outlasts_a_restart_of_the_server() -> None:
    answers = iter([run(1), None, None, run(2, "failed")])

    def handler(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json=answer)

    assert [s["state"] for s in client_of(handler).follow(1, wait=lambda _: None)] == ["running", "failed"]


def test_following_gives_up_on_a_server_that_stays_away() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ServerAway):
        list(client_of(handler).follow(1, wait=lambda _: None, away_s=0))


def test_following_ends_when_the_wait_says_so() -> None:
    client = client_of(lambda _: httpx.Response(200, json=run(1)))
    assert [state["version"] for state in client.follow(1, wait=lambda _: True)] == [1]
