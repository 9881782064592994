from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from grpo_engine.errors import CheckpointInvalid
from grpo_engine.manifest import (
    MANIFEST_NAME,
    Manifest,
    list_files,
    manifest_sha256,
    read_manifest,
    total_bytes,
    verify,
    write_manifest,
)
from grpo_engine.provenance import git_commit, package_versions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "trainer" / "state.json").write_text("{}")
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    files = list_files(tmp_path)
    manifest = Manifest(stage="1-rl", step=3, policy_version=9, created_at=now, config_hash="c" * 64, files=files)
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_an_untouched_folder_verifies_and_reads_back(folder: Path) -> None:
    manifest = verify(folder)
    assert manifest == read_manifest(folder)
    assert set(manifest.files) == {"model.safetensors", "trainer/state.json"}
    assert total_bytes(folder) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def change(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weighty")


def truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weigh")


def remove(folder: Path) -> None:
    (folder / "trainer" / "state.json").unlink()


def add(folder: Path) -> None:
    (folder / "trainer" / "extra.bin").write_bytes(b"")


def link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def link_folder(folder: Path) -> None:
    (folder / "mtp").symlink_to(folder.parent)


def damage_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes()[:-20])


def forge_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change, "model.safetensors has changed"),
        (truncate, "model.safetensors has 5 bytes; the manifest says 7"),
        (remove, "state.json is missing"),
        (add, "extra.bin is not in the manifest"),
        (link, "model.safetensors is not a regular file"),
        (link_folder, "mtp is not in the manifest"),
        (damage_manifest, "manifest.json: content: Invalid JSON"),
        (forge_manifest, "manifest.json: format: "),
        (lose_manifest, "no checkpoint"),
    ],
)
def test_tampering_names_file_and_fault(folder: Path, tamper: Callable[[Path], None], message: str) -> None:
    tamper(folder)
    with pytest.raises(CheckpointInvalid, match=message):
        verify(folder)


def test_manifest_hash_stands_for_all_bytes(folder: Path) -> None:
    before = manifest_sha256(folder)
    change(folder)
    manifest = read_manifest(folder).model_copy(update={"files": list_files(folder)})
    write_manifest(folder, manifest)
    assert manifest_sha256(folder) != before
    assert len(before) == 64


def test_manifest_and_provenance_load_no_torch() -> None:
    code = "import sys, grpo_engine.manifest, grpo_engine.provenance; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "False\n"


def test_provenance_names_commit_and_versions() -> None:
    commit = git_commit()
    assert commit is None or len(commit) == 40
    assert package_versions()["python"] == sys.version.split()[0]
    assert "pydantic" in package_versions()
