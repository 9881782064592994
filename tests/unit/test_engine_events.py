import json
import math
import resource

import pytest
from pydantic import ValidationError

from grpo_engine import events
from grpo_engine.errors import StorageFull


def test_sequence_numbers_rise_by_one_from_one(tmp_path):
    with events.Journal(tmp_path) as journal:
        for step in range(1, 4):
            journal.metrics(step, {"loss": 1.0}, stage="0-sft")
    assert [event.seq for event in events.read(tmp_path)] == [1, 2, 3]


def test_non_finite_numbers_become_null_with_their_kind(tmp_path):
    with events.Journal(tmp_path) as journal:
        journal.metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5}, stage="1-rl")
    line = json.loads((tmp_path / events.JOURNAL_NAME).read_text())
    assert line["values"] == {"a": None, "b": None, "c": None, "d": 0.5}
    assert line["nonfinite"] == {"a": "nan", "b": "+inf", "c": "-inf"}


def test_a_torn_last_line_is_left_for_later(tmp_path):
    with events.Journal(tmp_path) as journal:
        journal.append("started", config_hash="x")
        journal.append("finished", reason="finished")
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-9])
    [(event, offset)] = list(events.read_from(journal.path))
    assert event.type == "started"
    journal.path.write_bytes(whole)
    [(event, end)] = list(events.read_from(journal.path, offset))
    assert (event.type, end) == ("finished", len(whole))


def test_an_attempt_never_continues_anothers_journal(tmp_path):
    events.Journal(tmp_path).close()
    with pytest.raises(FileExistsError, match="exists"):
        events.Journal(tmp_path)


def test_an_event_of_unknown_type_is_refused_and_not_written(tmp_path):
    with events.Journal(tmp_path) as journal, pytest.raises(ValidationError):
        journal.append("rumour", text="?")
    assert journal.path.read_bytes() == b""


def test_a_line_that_a_full_disk_cut_short_does_not_spoil_the_next(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with events.Journal(tmp_path) as journal:
        journal.append("started", config_hash="x")
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 50, hard))
        try:
            with pytest.raises(StorageFull, match="journal"):
                journal.append("warning", message="long " * 50)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        journal.append("failed", reason="storage_full", message="no space")
    assert [(event.seq, event.type) for event in events.read(tmp_path)] == [(1, "started"), (2, "failed")]


def test_a_missing_journal_reads_as_empty(tmp_path):
    assert events.read(tmp_path) == []
