from __future__ import annotations

from pathlib import Path

import pytest

from app.artifacts import ArtifactStore, open_store
from app.runs import logs
from app.settings import Settings

KEY = "runs/r/attempts/1/engine.log"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    (tmp_path / "runs" / "r" / "attempts" / "1").mkdir(parents=True)
    return open_store(Settings(home=tmp_path))


def write(store: ArtifactStore, text: str | bytes) -> None:
    Path(store.path_of(KEY)).write_bytes(text.encode() if isinstance(text, str) else text)


def test_the_tail_is_the_last_whole_lines(store: ArtifactStore) -> None:
    write(store, "one\ntwo\nthree\n")
    assert logs.tail(store, KEY, 2) == logs.LogPiece("two\nthree\n", 4, 14, 14)
    assert logs.tail(store, KEY, 9).text == "one\ntwo\nthree\n"
    assert logs.tail(store, KEY, 0) == logs.LogPiece("", 14, 14, 14)


def test_a_huge_log_is_not_read_whole_and_begins_at_a_line(store: ArtifactStore) -> None:
    line = "x" * 999 + "\n"
    write(store, line * 3000)
    piece = logs.tail(store, KEY, 10_000)
    assert piece.end == 3_000_000
    assert 900_000 < len(piece.text) <= logs.MAX_TAIL_BYTES
    assert set(piece.text.splitlines()) == {"x" * 999}


def test_following_gives_every_byte_once_and_only_whole_lines(store: ArtifactStore) -> None:
    write(store, "one\ntw")
    first = logs.read_after(store, KEY, 0)
    assert first.text == "one\n"
    write(store, "one\ntwo\n")
    second = logs.read_after(store, KEY, first.end)
    assert (second.text, second.end) == ("two\n", 8)
    assert logs.read_after(store, KEY, 8).text == ""
    assert logs.read_after(store, KEY, 9999).start == 8


def test_a_line_longer_than_the_window_does_not_stop_the_reader(store: ArtifactStore) -> None:
    write(store, "x" * 50)
    assert logs.read_after(store, KEY, 0, max_bytes=20).end == 20


def test_bytes_that_are_no_text_are_shown_as_such(store: ArtifactStore) -> None:
    write(store, b"\xff\xfe\n")
    assert logs.tail(store, KEY).text == "\ufffd\ufffd\n"


def test_search_shows_the_lines_around_each_hit(store: ArtifactStore) -> None:
    write(store, "a\nb\nERROR one\nc\nerror two\nd\ne\nf\n")
    first, second = logs.search(store, KEY, "error", context=2)
    assert (first.line_number, first.before, first.line, first.after) == (
        3,
        ["a", "b"],
        "ERROR one",
        ["c", "error two"],
    )
    assert (second.before, second.after) == (["ERROR one", "c"], ["d", "e"])
    assert len(logs.search(store, KEY, "error", limit=1)) == 1
    assert logs.search(store, KEY, "e.*r") == []


def test_an_attempt_that_wrote_nothing_has_an_empty_log(store: ArtifactStore) -> None:
    assert logs.tail(store, KEY) == logs.LogPiece("", 0, 0, 0)
    assert logs.read_after(store, KEY, 0).text == ""
    assert logs.search(store, KEY, "x") == []
