"""What pages change, as plain forms that work without script; permissions; CSRF."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.configs.service import get_preset
from app.db import Database
from app.forms import SchemaForm
from app.runs.service import create_run, get_run
from app.users.service import ensure_first_user
from grpo_engine.config import RunConfig
from tests import seed
from tests.callers import browser, make_user
from tests.unit.test_forms import posted

FORM = SchemaForm(RunConfig.model_json_schema())


@pytest.fixture
def person(app: FastAPI) -> Iterator[TestClient]:
    with browser(app) as client:
        client.headers["Accept"] = "text/html"
        yield client


@pytest.fixture
def queued(database: Database) -> None:
    with database.write() as session:
        create_run(session, ensure_first_user(session), seed.config())


def form(**changes: str) -> dict[str, str]:
    """The demo preset as a browser would post it."""
    data = get_preset("demo").config.model_dump(mode="json")
    return posted(FORM.build(data)) | {"view": "form"} | changes


def test_a_run_is_launched_by_a_plain_form(person: TestClient, database: Database) -> None:
    response = person.post("/runs/new/launch", data=form(name="plain"), follow_redirects=False)
    assert response.status_code == 303
    assert response.headers["location"] == "/runs/1"
    with database.read() as session:
        run = get_run(session, 1)
    assert run.name == "plain"
    assert RunConfig.model_validate(run.config).hash() == run.config_hash
    assert "Run #1 is queued." in person.get("/runs/1").text


def test_invalid_input_is_answered_422_at_its_field_and_kept(person: TestClient) -> None:
    fields = form(**{"name": "kept", "stages.1.group_size": "1", "stages.1.optimizer.learning_rate": "fast"})
    response = person.post("/runs/new/launch", data=fields)
    assert response.status_code == 422
    assert 'value="kept"' in response.text
    assert 'value="fast"' in response.text
    assert 'id="f-stages-1-group_size-error"' in response.text
    assert 'aria-describedby="f-stages-1-group_size-help f-stages-1-group_size-error"' in response.text
    assert '<details class="section" id="s-stages.1.optimizer" open>' in response.text


def test_yaml_that_is_none_says_where(person: TestClient) -> None:
    response = person.post("/runs/new", data={"view": "yaml", "op": "form", "yaml": "name: [1\nb: 2"})
    assert response.status_code == 422
    assert "line 2" in response.text
    assert "correct the YAML there" in response.text
    assert "name: [1" in response.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"view": "yaml", "op": "form", "yaml": "stages: 3\nname: [1]"}, 200),
        ({"view": "yaml", "op": "form", "yaml": "[" * 3000}, 422),
        ({"view": "yaml", "op": "form", "yaml": "name: &a [1]\ntags: [" + "*a, " * 20_000 + "]"}, 422),
        ({"stages.length": "three", "op": "refresh"}, 200),
        ({"name": "abc", "op": "remove name.0"}, 400),
        ({"name": "abc", "op": "up name.0"}, 400),
    ],
)
def test_no_draft_is_too_odd_for_the_form(person: TestClient, fields: dict[str, str], status: int) -> None:
    assert person.post("/runs/new", data=fields).status_code == status


def test_a_field_that_the_form_has_no_place_for_is_named(person: TestClient) -> None:
    text = get_preset("demo").yaml + "sede: 1\n"
    page = person.post("/runs/new", data={"view": "yaml", "op": "form", "yaml": text})
    assert page.status_code == 200
    assert "<code>sede</code>" in page.text


def test_yaml_becomes_the_form_and_back(person: TestClient) -> None:
    text = get_preset("demo").yaml.replace("seed: 0", "seed: 77")
    as_form = person.post("/runs/new", data={"view": "yaml", "op": "form", "yaml": text}).text
    assert 'name="seed" aria-describedby="f-seed-help" value="77"' in as_form
    as_yaml = person.post("/runs/new", data=form(seed="78", op="yaml")).text
    assert "seed: 78" in as_yaml


def test_stages_are_added_moved_and_removed_without_script(person: TestClient) -> None:
    added = person.post("/runs/new", data=form(op="add stages rl")).text
    assert 'name="stages.2.kind"' in added
    removed = person.post("/runs/new", data=form(op="remove stages.0")).text
    assert 'name="stages.1.kind"' not in removed
    assert person.post("/runs/new", data=form(op="add nonsense rl")).status_code in (400, 404, 422)


def test_an_htmx_request_gets_the_editor_alone(person: TestClient) -> None:
    response = person.post("/runs/new", data=form(op="refresh"), headers={"HX-Request": "true"})
    assert response.text.lstrip().startswith('<form class="editor" id="editor"')
    assert "<nav" not in response.text


def test_a_config_is_saved_and_a_bad_name_is_refused_at_its_field(person: TestClient) -> None:
    saved = person.post("/runs/new/save", data=form(_save_name="addition", _note="first"), follow_redirects=False)
    assert saved.headers["location"] == "/runs/new?config=addition@1"
    refused = person.post("/runs/new/save", data=form(_save_name="../x"))
    assert refused.status_code == 422
    assert 'id="save-error"' in refused.text
    assert "first" in person.get("/configs/addition").text


@pytest.mark.usefixtures("queued")
def test_a_run_is_paused_resumed_cancelled_and_deleted(person: TestClient, database: Database) -> None:
    for act, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        assert person.post(f"/runs/1/{act}", follow_redirects=False).status_code == 303
        with database.read() as session:
            assert get_run(session, 1).state == state
    assert person.post("/runs/1/delete", follow_redirects=False).headers["location"] == "/runs"
    assert person.get("/runs/1").status_code == 404


@pytest.mark.usefixtures("queued")
def test_an_act_in_the_wrong_state_is_said_on_the_page(person: TestClient) -> None:
    page = person.post("/runs/1/resume")
    assert page.status_code == 200
    assert "cannot be resumed" in page.text
    assert "cannot be resumed" not in person.get("/runs/1").text


@pytest.mark.usefixtures("queued")
def test_a_write_without_its_csrf_token_changes_nothing(app: FastAPI, database: Database) -> None:
    with browser(app, csrf=False) as client:
        assert client.post("/runs/1/cancel").status_code == 403
        assert client.post("/runs/new/launch", data=form()).status_code == 403
        assert client.post("/settings/tokens", data={"name": "x"}).status_code == 403
    with database.read() as session:
        assert get_run(session, 1).state == "queued"


@pytest.mark.usefixtures("queued")
def test_a_form_field_carries_the_csrf_token_too(app: FastAPI, person: TestClient, database: Database) -> None:
    token = person.headers.pop("X-CSRF-Token")
    assert person.post("/runs/1/cancel", data={"csrf_token": token}, follow_redirects=False).status_code == 303
    with database.read() as session:
        assert get_run(session, 1).state == "cancelled"


@pytest.mark.usefixtures("queued")
def test_a_reader_sees_no_buttons_and_may_not_act(app: FastAPI) -> None:
    with browser(app, make_user(app, ["read"])) as client:
        page = client.get("/runs/1", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "Cancel" not in page.text
        assert "Let it stop" not in page.text
        assert client.post("/runs/1/cancel").status_code == 403
        assert "Register a reward" not in client.get("/rewards").text
        assert client.post("/rewards", data={"name": "x", "source": "def f(): 1"}).status_code == 403


def test_get_changes_nothing(app: FastAPI, person: TestClient) -> None:
    for path in ("/runs/1/cancel", "/runs/1/delete", "/logout", "/settings/tokens", "/runs/new/launch"):
        assert person.get(path).status_code in (404, 405), path


def test_the_password_is_set_and_used(app: FastAPI, person: TestClient, anonymous: TestClient) -> None:
    person.headers.pop("X-CSRF-Token", None)
    assert "differ" in post_password(app, "four random words", "four other words")
    assert "10 or more" in post_password(app, "short", "short")
    post_password(app, "four random words", "four random words")
    login = {"name": "admin", "password": "four random words"}
    assert anonymous.post("/login", data=login, follow_redirects=False).status_code == 303
    wrong = anonymous.post("/login", data={**login, "password": "no"})
    assert wrong.status_code == 401
    assert "Name or password is wrong" in wrong.text


def post_password(app: FastAPI, password: str, again: str) -> str:
    with browser(app) as client:
        return client.post("/settings/password", data={"password": password, "again": again}).text
