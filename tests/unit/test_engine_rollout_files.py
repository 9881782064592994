import json

import pyarrow.parquet as pq

from grpo_engine.rollout_files import SCHEMA, batch_name, write_batch
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout


def make_group(index: int, rewards: list[float | None]) -> Group:
    prompt = Prompt(f"addition/{index}", index, f"{index}+1=", [index, 9], {"answer": str(index + 1)})
    rollouts = [
        Rollout(
            Completion([4, 2], f"text {number}", "stop", [-0.5, -0.25], [-0.5, -0.25], ["4", "<eos>"], None, 7),
            [RewardPart("accuracy", reward, 1.0, "because", (0, 4), "accuracy@1", counted=reward and 0.0)],
            reward,
            0.5,
            [-0.4, -0.2],
            behaviours={"reflection": 2, "verification": 0},
        )
        for number, reward in enumerate(rewards)
    ]
    return Group(f"12-{index}", prompt, rollouts)


def test_one_row_group_a_prompt_group_and_one_row_a_completion(tmp_path):
    path = tmp_path / batch_name(12)
    write_batch(path, [make_group(0, [1.0, 0.0]), make_group(1, [None, 1.0])], {"batch": 12})
    file = pq.ParquetFile(path)
    assert path.name == "batch-000012.parquet"
    assert file.num_row_groups == 2
    assert file.read_row_group(1)["group_id"].to_pylist() == ["12-1", "12-1"]


def test_everything_about_a_completion_comes_back(tmp_path):
    path = tmp_path / "rollouts" / batch_name(1)
    write_batch(path, [make_group(3, [1.0])], {"stage": "1-rl"})
    table = pq.read_table(path)
    row = table.to_pylist()[0]
    assert table.schema.equals(SCHEMA)
    assert json.loads(table.schema.metadata[b"cohort"]) == {"stage": "1-rl"}
    assert row["gold"] == "4"
    assert row["reward"] == 1.0
    assert row["advantage"] == 0.5
    assert row["token_texts"] == ["4", "<eos>"]
    assert row["parts"][0]["span_end"] == 4
    assert (row["parts"][0]["value"], row["parts"][0]["counted"]) == (1.0, 0.0)
    assert dict(row["behaviours"]) == {"reflection": 2, "verification": 0}


def test_an_abstained_reward_is_null_not_zero(tmp_path):
    write_batch(tmp_path / "b.parquet", [make_group(0, [None])], {})
    assert pq.read_table(tmp_path / "b.parquet")["reward"].to_pylist() == [None]


def test_nothing_half_written_stays_behind(tmp_path):
    write_batch(tmp_path / "b.parquet", [make_group(0, [1.0])], {})
    assert [path.name for path in tmp_path.iterdir()] == ["b.parquet"]
