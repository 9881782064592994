"""What the benchmarks compute themselves: batches, shares, verdicts. Nothing is trained here."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks import (
    batches,
    engine_runs,
    gpu_training,
    memory,
    memory_study,
    peers,
    results,
    stability,
    training,
    update,
)
from benchmarks.results import Row


def test_the_skewed_batch_has_the_lengths_that_the_claim_names() -> None:
    lengths = sorted(len(row.completion_ids) for row in batches.skewed().rows)
    assert median(lengths) == 60
    assert 900 <= lengths[-2] <= 1024
    assert len(lengths) == 128


def test_long_rows_lie_between_100_and_600_tokens_with_mean_300() -> None:
    totals = [len(row.prompt_ids) + len(row.completion_ids) for row in batches.long_rows().rows]
    assert (min(totals), max(totals), fmean(totals), len(totals)) == (100, 600, 300, 16)


def test_a_group_shares_its_prompt_and_no_other_group_has_it() -> None:
    batch = batches.skewed()
    prompts = {tuple(row.prompt_ids) for row in batch.rows}
    assert len(prompts) == len(batch.rows) // batch.group_size


def test_the_same_seed_gives_the_same_batch_and_another_seed_another() -> None:
    assert batches.skewed(1) == batches.skewed(1)
    assert batches.skewed(1) != batches.skewed(2)


def test_advantages_given_to_both_sides_are_rewards_less_the_groups_mean() -> None:
    batch = batches.long_rows()
    given = [float(str(row["advantage"])) for row in update.with_advantages(batch)]
    assert sum(given[: batch.group_size]) == pytest.approx(0)
    first = batch.rows[: batch.group_size]
    assert given[0] == pytest.approx(first[0].reward - fmean(row.reward for row in first))


@pytest.mark.parametrize(
    ("ours", "peer", "goal", "better", "met"),
    [
        (5.0, 2.0, 2.5, "more", True),
        (4.9, 2.0, 2.5, "more", False),
        (0.7, 1.0, 0.7, "less", True),
        (0.8, 1.0, 0.7, "less", False),
        (0.92, None, 0.91, "more", True),
        (0.90, None, 0.91, "more", False),
        (1.0, 2.0, None, "more", None),
    ],
)
def test_a_claim_is_met_by_its_ratio_or_without_a_peer_by_its_value(
    ours: float, peer: float | None, goal: float | None, better: str, met: bool | None
) -> None:
    assert Row("claim", ours, peer, "unit", "limit", goal, better).met is met


def test_results_keep_rows_of_claims_that_were_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.write("training", [Row("a", 1, 2, "u", "l"), Row("b", 1, None, "u", "l")])
    path = results.write("training", [Row("a", 3, 2, "u", "l")])
    rows = {row["claim"]: row for row in json.loads(path.read_text())["rows"]}
    assert (rows["a"]["ratio"], rows["b"]["ours"], rows["b"]["ratio"]) == (1.5, 1, None)


def test_a_claim_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.arguments(["--only", "update_fast"])
    assert "update_fast" in capsys.readouterr().err


def test_the_claim_ids_are_those_of_the_issue() -> None:
    assert training.arguments([]).claims == [
        "update_skewed", "update_135m", "update_135m_memory", "packing", "vocab_memory", "two_ranks"
    ]  # fmt: skip


def test_a_peer_that_is_named_but_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COHORT_TRL_VENV", str(tmp_path))
    with pytest.raises(peers.PeerMissing, match=r"no bin/python; name a virtual environment"):
        peers.trl_python()


def test_changed_leaves_the_original_alone() -> None:
    config = {"stages": [{}, {"optimizer": {"learning_rate": 1}}]}
    other = engine_runs.changed(config, stages__1__optimizer__learning_rate=2, needs__num_ranks=2)
    assert other == {"stages": [{}, {"optimizer": {"learning_rate": 2}}], "needs": {"num_ranks": 2}}
    assert config["stages"][1]["optimizer"] == {"learning_rate": 1}


def test_arithmetic_never_finds_the_saving_that_the_report_claims() -> None:
    found = memory.predictions()
    assert [row["model"] for row in found] == ["7 B", "70 B"]
    assert all(0.4 < row["saving"] < row["saving_with_reward_model"] < memory.CLAIMED_SAVING for row in found)


def test_a_run_that_never_came_counts_as_the_whole_length_and_not_as_reached() -> None:
    row = memory_study.summary("grpo", [10, 12, None], [1.0, 2.0, 3.0])
    assert (row["reached"], row["median_steps"], row["high"]) == (2, 12, memory_study.STEPS)


def test_a_run_that_collapsed_after_reaching_the_target_has_not_passed() -> None:
    own = [
        stability.Outcome("a", 0, 0.95, 0.99, "finished"),
        stability.Outcome("a", 1, 0.1, 0.95, "finished", ["3: guard_kl"], checkpoints=2),
    ]
    row = stability.summary(own)[0]
    assert (row["passed"], row["ever_reached"], row["failed_with_finding"]) == (1, 2, 1)


def test_the_gpu_benchmark_reads_its_arguments() -> None:
    parsed = gpu_training.arguments(["--device", "cpu", "--rounds", "1", "--without-peer"])
    assert (parsed.device, parsed.rounds, parsed.without_peer) == ("cpu", 1, True)
    assert gpu_training.without_threads({"threads": (1, 2), "rows": (8,)}) == {"rows": (8,)}
