from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests import seed
from tests.integration.test_api_runs import walk


def newest(client: TestClient) -> dict[str, Any]:
    return dict(client.get("/api/v1/checkpoints", params={"run": 1}).json()["items"][0])


def folder_of(client: TestClient, checkpoint: dict[str, Any]) -> Path:
    app: Any = client.app
    name = f"{checkpoint['stage']}-{checkpoint['step']:06d}"
    attempts = app.state.settings.home / "runs" / checkpoint["run_id"] / "attempts"
    return Path(attempts / str(checkpoint["attempt"]) / "checkpoints" / name)


def test_the_list_equals_the_folders_on_disk(any_seeded: TestClient) -> None:
    listed = walk(any_seeded, "/api/v1/checkpoints", run=1, limit=2)
    app: Any = any_seeded.app
    on_disk = {path for path in app.state.settings.home.glob("runs/*/attempts/*/checkpoints/*") if path.is_dir()}
    assert {folder_of(any_seeded, checkpoint) for checkpoint in listed} == on_disk
    assert len(listed) == len(on_disk)
    assert [checkpoint["step"] for checkpoint in listed] == [24, 16, 8, 30]


def test_a_checkpoint_names_its_parent(any_seeded: TestClient) -> None:
    last, before, *_ = any_seeded.get("/api/v1/checkpoints", params={"run": 1}).json()["items"]
    assert (last["parent_id"], last["parent_step"]) == (before["id"], 16)
    assert any_seeded.get(f"/api/v1/checkpoints/{last['id']}").json() == last


def test_an_untouched_checkpoint_verifies(any_seeded: TestClient) -> None:
    checkpoint = newest(any_seeded)
    assert checkpoint["state"] == "saved"
    result = any_seeded.post(f"/api/v1/checkpoints/{checkpoint['id']}/verify").json()
    assert (result["damage"], result["checkpoint"]["state"]) == ([], "verified")
    assert result["checkpoint"]["verified_at"] is not None


def flip(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[100] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"short")


def lose(folder: Path) -> None:
    (folder / "config.json").unlink()


def add(folder: Path) -> None:
    (folder / "extra.bin").write_bytes(b"x")


def rewrite(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("harm", [flip, cut, lose, add, rewrite])
def test_a_changed_checkpoint_is_damaged_and_cannot_be_forked(seeded: TestClient, harm: Any) -> None:
    checkpoint = newest(seeded)
    harm(folder_of(seeded, checkpoint))
    result = seeded.post(f"/api/v1/checkpoints/{checkpoint['id']}/verify").json()
    assert result["checkpoint"]["state"] == "damaged"
    assert len(result["damage"]) == 1
    changes = {"stages.1.num_steps": 99}
    assert seeded.post(f"/api/v1/checkpoints/{checkpoint['id']}/fork", json={"changes": changes}).status_code == 409


def test_files_and_archive_hold_the_bytes_on_disk(seeded: TestClient) -> None:
    checkpoint = newest(seeded)
    folder = folder_of(seeded, checkpoint)
    base = f"/api/v1/checkpoints/{checkpoint['id']}"
    listed = {entry["path"]: entry["bytes"] for entry in seeded.get(f"{base}/files").json()["items"]}
    on_disk = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert listed == {name: len(content) for name, content in on_disk.items()}
    assert {name: seeded.get(f"{base}/files/{name}").content for name in listed} == on_disk
    answer = seeded.get(f"{base}/archive")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        names = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive.getmembers()}
        assert {name: file.read() for name, file in names.items() if file} == on_disk


@pytest.mark.parametrize(
    "path",
    [
        "../../../../../../secret_key", "..%2f..%2fsecret_key", "%2e%2e/%2e%2e/config.json", "/etc/passwd",
        "trainer/%2e%2e/config.json", "config.json%00.txt", "config.json%23x", "C:/config.json", "..\\config.json",
        "%252e%252e/config.json", "trainer",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_a_checkpoint(seeded: TestClient, path: str) -> None:
    answer = seeded.get(f"/api/v1/checkpoints/{newest(seeded)['id']}/files/{path}")
    assert answer.status_code in (400, 404)
    assert b"secret" not in answer.content or answer.headers["content-type"] == "application/problem+json"


def test_a_link_inside_a_checkpoint_leads_nowhere(seeded: TestClient) -> None:
    checkpoint = newest(seeded)
    app: Any = seeded.app
    (folder_of(seeded, checkpoint) / "leak.json").symlink_to(app.state.settings.home / "secret_key")
    answer = seeded.get(f"/api/v1/checkpoints/{checkpoint['id']}/files/leak.json")
    assert answer.status_code == 400


# ---------------------------------------------------------------- forks
def test_a_fork_begins_at_the_checkpoint_with_changed_settings(any_seeded: TestClient) -> None:
    checkpoint = newest(any_seeded)
    changes = {"name": "forked", "stages.1.num_steps": 60, "stages.1.optimizer.learning_rate": 1e-5}
    fork = any_seeded.post(f"/api/v1/checkpoints/{checkpoint['id']}/fork", json={"changes": changes}).json()
    assert (fork["state"], fork["parent_checkpoint_id"]) == ("queued", checkpoint["id"])
    assert fork["parent_run_id"] == checkpoint["run_id"]
    answer = any_seeded.delete("/api/v1/runs/1")
    assert answer.status_code == 409
    assert f"Run {fork['number']}" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "stages.1.num_steps"),
        ({"stages.1.num_steps": seed.RL_STEPS - 1}, "stages.1.num_steps"),
        ({"model.hidden_size": 64, "stages.1.num_steps": 60}, "model"),
        ({"adapter": {"kind": "lora"}, "stages.1.num_steps": 60}, "adapter"),
        ({"stages.1.advantage": {"kind": "gae"}, "stages.1.num_steps": 60}, "stages.1.advantage.kind"),
        ({"stages": [{"kind": "sft", "data": {"source": "addition"}}]}, "stages"),
        ({"stages.1.group_size": 1}, "stages.1.group_size"),
        ({"stages.1.nothing": 1}, "stages.1.nothing"),
    ],
)
def test_a_fork_that_does_not_fit_its_checkpoint_is_refused(
    seeded: TestClient, changes: dict[str, Any], field: str
) -> None:
    answer = seeded.post(f"/api/v1/checkpoints/{newest(seeded)['id']}/fork", json={"changes": changes})
    assert answer.status_code == 422
    assert [entry["field"] for entry in answer.json()["errors"]] == [field]
