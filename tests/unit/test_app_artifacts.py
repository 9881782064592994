from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from app.artifacts import ArtifactStore, BadKey, Entry, check_key, open_store
from app.errors import NotFound
from app.settings import Settings

PARTS = [
    "..",
    ".",
    "",
    "runs",
    "a",
    "a.txt",
    "%2e%2e",
    "%2f",
    "\x00",
    "#x",
    "C:",
    "~",
    "\\",
    "..\\..",
    "．．",
    "a b",
    "é",
]
ATTACKS = [
    "", "/", "runs", "secret_key", "cohort.db", "/etc/passwd", "../secret_key", "runs/../secret_key",
    "runs/./a", "runs//a", "runs/a/", "runs/%2e%2e/secret_key", "runs/..%2fsecret_key", "runs/a\x00.txt",
    "runs/a#fragment", "runs/a?x", "C:/windows", "runs/C:/a", "runs\\..\\secret_key", "runs/a b", "file:///etc/passwd",
    "runs/...", "runs/a\n", "runs/" + "a" * 600,
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    (tmp_path / "home" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "home" / "runs" / "a" / "a.txt").write_bytes(b"inside")
    (tmp_path / "home" / "secret_key").write_bytes(b"outside")
    return open_store(Settings(home=tmp_path / "home"))


@pytest.mark.parametrize("key", ATTACKS)
def test_keys_that_lead_outside_are_refused(store: ArtifactStore, key: str) -> None:
    for use in (store.open, store.exists, store.size, store.list, store.remove):
        with pytest.raises(BadKey):
            use(key)


@fuzz(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PARTS), max_size=6).map("/".join)))
@example("runs/a/../../secret_key")
def test_whatever_the_key_nothing_outside_is_read(store: ArtifactStore, key: str) -> None:
    try:
        with store.open(key) as file:
            assert file.read() == b"inside"
    except (BadKey, NotFound):
        pass


@given(st.lists(st.from_regex(r"[a-z0-9_@+=-]{1,8}(\.[a-z]{1,3})?", fullmatch=True), min_size=1, max_size=5))
def test_plain_paths_are_keys(segments: list[str]) -> None:
    key = "/".join(["runs", *segments])
    assert check_key(key) == key


def test_links_that_lead_outside_are_refused(store: ArtifactStore) -> None:
    folder = Path(store.root) / "runs" / "a"
    (folder / "leak").symlink_to(Path(store.root) / "secret_key")
    (folder / "up").symlink_to(Path(store.root))
    for key in ("runs/a/leak", "runs/a/up/secret_key"):
        with pytest.raises(BadKey):
            store.open(key)


def test_files_below_a_key_are_listed_with_their_size(store: ArtifactStore) -> None:
    assert store.list("runs/a") == [Entry("a.txt", 6)]
    assert store.list("runs/nothing") == []
    assert store.size("runs/a/a.txt") == 6
    with pytest.raises(NotFound):
        store.size("runs/a/b.txt")


def test_a_store_by_url_holds_the_same_keys(tmp_path: Path, store: ArtifactStore) -> None:
    remote = open_store(Settings(home=tmp_path / "home", artifact_url="memory://artifacts"))
    remote.upload(Path(store.root) / "runs" / "a", "runs/a")
    assert b"".join(remote.read_chunks("runs/a/a.txt")) == b"inside"
    assert remote.list("runs/a") == [Entry("a.txt", 6)]
    remote.remove("runs/a")
    remote.remove("runs/a")
    assert not remote.exists("runs/a/a.txt")
