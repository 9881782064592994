"""Stored rollouts scored again: what changes, what stays, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_engine.__main__ import main
from grpo_engine.reward.replay_changes import Changes, Rescored, advantages, mean_ranks, rank_correlation
from grpo_engine.rollout_files import batch_name, spread, write_batch
from grpo_engine.types import RewardPart
from tests.seed import config
from tests.seed_rollouts import make_groups, stage_config

ACCURACY = {"kind": "accuracy", "compare": "number"}


def stored(folder: Path, batches: int = 3, stage: str = "1-rl") -> Path:
    """An attempt's folder with rollouts of three-digit additions."""
    for step in range(1, batches + 1):
        about = {"batch": step, "stage": stage, "advantage": {"form": "grpo", "kl": None}}
        write_batch(folder / "rollouts" / batch_name(step), make_groups(step, stage_config(config())), about)
    return folder


def replayed(folder: Path, rewards: Any, capsys: Any, *more: str) -> tuple[int, dict[str, Any]]:
    given = folder / "new.yaml"
    given.write_text(json.dumps(rewards if isinstance(rewards, dict) else {"rewards": rewards}))
    status = main(["replay", str(folder), "--config", str(given), "--out", str(folder / "out"), *more])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, answer


def row(index: int, old: float | None, new: float | None) -> Rescored:
    def part(value: float | None) -> list[RewardPart]:
        return [RewardPart("taste", value, 1.0, version="taste@1", counted=value)]

    return Rescored(1, 0, index, "1-0", "p", "2+3=", "5", "5", old, new, old, new, part(old), part(new))


# ---------------------------------------------------------------- what changed
def test_the_opposite_reward_turns_every_sign_and_the_best() -> None:
    changes = Changes()
    changes.add([row(index, value, -value) for index, value in enumerate((0.0, 1.0, 3.0))])
    told = changes.summary()
    assert told["rank_correlation"] == pytest.approx(-1)
    assert (told["sign_changed_share"], told["best_changed_share"]) == (1.0, 1.0)
    assert [one["completion"] for one in told["examples"]] == [2, 0, 1]


def test_a_reward_that_no_longer_tells_apart_is_told_from_one_that_disagrees() -> None:
    changes = Changes()
    changes.add([row(0, 1.0, 0.5), row(1, 0.0, 0.5), row(2, None, 0.5)])
    told = changes.summary()
    assert told["rank_correlation"] is None
    assert (told["old_flat_share"], told["new_flat_share"]) == (0.0, 1.0)
    assert (told["sign_changed_share"], told["became_zero_share"]) == (0.0, pytest.approx(2 / 3))
    assert told["parts"]["taste"]["old_abstained"] == 1


def test_a_scaled_reward_changes_nothing() -> None:
    changes = Changes()
    changes.add([row(index, value, 10 * value + 7) for index, value in enumerate((0.0, 1.0, 1.0))])
    told = changes.summary()
    assert told["rank_correlation"] == pytest.approx(1)
    assert (told["sign_changed_share"], told["best_changed_share"], told["examples"]) == (0.0, 0.0, [])


def test_a_best_that_was_shared_and_is_still_one_of_the_best_has_not_changed() -> None:
    changes = Changes()
    changes.add([row(0, 1.0, 0.5), row(1, 1.0, 1.0), row(2, 0.0, 0.0)])
    assert changes.summary()["best_changed_share"] == 0.0


def test_examples_are_the_largest_changes_of_all_groups_and_of_long_texts_the_ends() -> None:
    changes = Changes()
    turned = [replace(row(0, 1.0, 0.0), text="a" * 3000 + "end"), row(1, 0.0, 1.0)]
    for group in (turned, *[[row(0, 1.0, 1.0), row(1, 1.0, 0.0)]] * 15, turned):
        changes.add(group)
    sizes = [one["change"] for one in changes.examples]
    assert sizes == pytest.approx([2**0.5] * 4 + [0.5**0.5] * 16)
    assert (len(changes.examples[0]["text"]), changes.examples[0]["text"][-4:]) == (2000, "aend")


def test_ranks_of_equals_are_shared_and_correlate_as_by_hand() -> None:
    assert mean_ranks([5, 7, 5]) == [0.5, 2.0, 0.5]
    assert rank_correlation([1, 2, 3, None], [10, 20, 15, 9]) == pytest.approx(0.5)
    assert advantages([1.0, 0.0, None]) == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0])
    assert advantages([1.0, None]) == [0.0, 0.0]


def test_batches_are_spread_from_the_first_to_the_last() -> None:
    paths = [Path(name) for name in "abcde"]
    assert [path.name for path in spread(paths, 3)] == ["a", "c", "e"]
    assert [path.name for path in spread(paths, 1)] == ["e"]
    assert spread(paths, 9) == paths


# ---------------------------------------------------------------- the command
def test_every_stored_completion_is_judged_again_and_the_files_stay(tmp_path: Path, capsys: Any) -> None:
    folder = stored(tmp_path)
    before = hashlib.sha256((folder / "rollouts" / batch_name(2)).read_bytes()).hexdigest()
    status, told = replayed(folder, [ACCURACY], capsys)
    rows = pq.read_table(folder / "out" / "replay.parquet").to_pylist()
    assert (status, told["num_batches"], told["num_groups"], len(rows)) == (0, 3, 12, 48)
    assert {part["version"][:9] for row in rows for part in row["new_parts"]} == {"accuracy@"}
    assert told["parts"]["accuracy"]["old_mean"] == told["parts"]["accuracy"]["new_mean"]
    assert told["parts"]["accuracy"]["old_versions"] == ["accuracy@3f9a12c4"]
    assert told == json.loads((folder / "out" / "summary.json").read_text())
    assert hashlib.sha256((folder / "rollouts" / batch_name(2)).read_bytes()).hexdigest() == before


def test_the_stage_of_a_whole_config_is_found_by_its_key(tmp_path: Path, capsys: Any) -> None:
    changed = config().model_dump(mode="json")
    changed["stages"][1]["rewards"] = [{"kind": "format"}]
    status, told = replayed(stored(tmp_path), changed, capsys, "--max-batches", "1")
    assert (status, told["stage"], told["num_batches"]) == (0, "1-rl", 1)
    assert told["parts"]["format"]["new_versions"] != told["parts"]["format"]["old_versions"]
    assert told["parts"]["length"]["new_mean"] is None


def test_of_several_stages_the_one_of_the_rollouts_is_meant(tmp_path: Path, capsys: Any) -> None:
    changed = config().model_dump(mode="json")
    changed["stages"].append({**changed["stages"][1], "rewards": [{"kind": "format"}]})
    status, told = replayed(stored(tmp_path, 1, stage="2-rl"), changed, capsys)
    assert (status, told["parts"]["accuracy"]["new_mean"]) == (0, None)
    assert told["parts"]["format"]["new_mean"] is not None


def test_parts_that_count_tokens_see_as_many_as_were_sampled(tmp_path: Path, capsys: Any) -> None:
    length = {"kind": "length", "max_tokens": 10, "buffer_tokens": 5}
    replayed(stored(tmp_path, 1), [length], capsys)
    [old, new] = [
        sorted(pq.read_table(path).to_pylist(), key=lambda row: (row["group_index"], row["completion_index"]))
        for path in (tmp_path / "rollouts" / batch_name(1), tmp_path / "out" / "replay.parquet")
    ]
    said = [row["new_parts"][0]["explanation"].split()[0] for row in new]
    assert said == [str(row["num_tokens"]) for row in old]


def test_kl_in_the_old_advantages_is_left_out(tmp_path: Path, capsys: Any) -> None:
    groups = make_groups(1, stage_config(config()))
    for group in groups:
        group.rollouts[:] = [type(r)(r.completion, r.parts, r.reward, shaped_reward=-9.0) for r in group.rollouts]
    about = {"batch": 1, "stage": "1-rl", "advantage": {"form": "grpo", "kl": {"place": "reward", "weight": 0.1}}}
    write_batch(tmp_path / batch_name(1), groups, about)
    status, told = replayed(tmp_path, [ACCURACY], capsys)
    assert (status, told["old_flat_share"]) == (0, 0.0)


@pytest.mark.parametrize(
    ("rewards", "more", "word"),
    [([ACCURACY], ["--stage", "2-rl"], "no rollouts of stage 2-rl"), ([{"kind": "tase"}], [], "tase"),
     ([{"kind": "custom", "name": "mine"}], [], "no source"), ({"rewards": []}, [], "at least 1")],
)  # fmt: skip
def test_what_cannot_be_scored_again_is_said(
    rewards: Any, more: list[str], word: str, tmp_path: Path, capsys: Any
) -> None:
    status, told = replayed(stored(tmp_path, 1), rewards, capsys, *more)
    assert status == 2
    assert word in json.dumps(told["problems"])


def test_a_part_that_needs_a_model_is_built_and_abstains_where_it_cannot_ask(tmp_path: Path, capsys: Any) -> None:
    judge = {"kind": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r", "time_limit_s": 0.05}
    status, told = replayed(stored(tmp_path, 1), [judge], capsys)
    assert (status, told["parts"]["judge"]["new_abstained"]) == (0, 16)


def test_a_folder_without_rollouts_and_a_damaged_file_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert "no rollout file" in replayed(tmp_path, [ACCURACY], capsys)[1]["problems"][0]["message"]
    (tmp_path / batch_name(1)).write_bytes(b"PAR1 but not really")
    assert "cannot be read" in replayed(tmp_path, [ACCURACY], capsys)[1]["problems"][0]["message"]
