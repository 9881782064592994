import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine import events
from grpo_engine.config import RunConfig
from grpo_engine.manifest import read_manifest
from tests.engine_configs import rl_stage, tiny_config
from tests.engine_process import named, newest_checkpoint, run_engine

pytestmark = pytest.mark.xdist_group("runs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "run"
    assert run_engine(tiny_config(), folder) == 0
    return folder


def test_the_journal_tells_the_whole_run_in_order(finished):
    types = [event.type for event in events.read(finished)]
    assert types[0] == "started"
    assert types[-1] == "finished"
    assert [event.stage for event in named(finished, "stage_started")] == ["0-sft", "1-rl"]
    assert [event.step for event in named(finished, "evaluation")] == [0, 5, 10]
    assert [(event.stage, event.step) for event in named(finished, "trained")] == [
        (stage, step) for stage in ("0-sft", "1-rl") for step in range(1, 11)
    ]


def test_rollouts_are_on_disk_before_their_step(finished):
    order = [
        (event.type, event.batch if event.type == "rollouts" else event.step)
        for event in events.read(finished)
        if event.stage == "1-rl" and event.type in ("rollouts", "trained")
    ]
    assert order == [(kind, step) for step in range(1, 11) for kind in ("rollouts", "trained")]
    assert all((finished / event.path).is_file() for event in named(finished, "rollouts"))


def test_a_checkpoint_loads_with_transformers_and_generates(finished):
    checkpoint = newest_checkpoint(finished)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer("1+2=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.shape[1]


def test_retention_keeps_the_newest_and_each_stages_last(finished):
    kept = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert kept == ["0-sft-000005", "0-sft-000010", "1-rl-000006", "1-rl-000009", "1-rl-000010"]
    assert [event.path for event in named(finished, "checkpoint_removed")] == ["checkpoints/1-rl-000003"]


def test_a_checkpoint_names_its_data_and_rewards_by_version(finished):
    manifest = read_manifest(newest_checkpoint(finished))
    assert list(manifest.data_versions) == ["0-sft", "1-rl"]
    assert all(version.startswith("addition@") for version in manifest.data_versions.values())
    assert list(manifest.reward_versions) == ["accuracy", "length"]


def test_early_stopping_state_is_journaled_every_step(finished):
    states = named(finished, "early_stopping")
    assert [state.step for state in states] == list(range(1, 11))
    assert [state.armed for state in states] == [step > 3 for step in range(1, 11)]
    assert {state.mode for state in states} == {"observe"}


def test_with_a_constant_reward_nothing_improves(tmp_path):
    source = tmp_path / "constant.py"
    source.write_text("def reward(completions, **columns):\n    return [1.0] * len(completions)\n")
    config = tiny_config(rl_stage(rewards=[{"kind": "custom", "name": "constant"}], num_steps=6))
    assert run_engine(config, tmp_path / "run", "--reward", f"constant={source}") == 0
    lengths = [event.metrics["mean_length_tokens"] for event in named(tmp_path / "run", "evaluation")]
    assert len(set(lengths)) == 1
    assert all(event.dropped == {"zero_variance": 4} for event in named(tmp_path / "run", "trained"))


def test_a_reward_that_always_raises_is_told_once(tmp_path):
    source = tmp_path / "broken.py"
    source.write_text("def reward(completions):\n    return [1 / 0 for _ in completions]\n")
    config = tiny_config(rl_stage(rewards=[{"kind": "custom", "name": "broken"}], num_steps=2))
    assert run_engine(config, tmp_path / "run", "--reward", f"broken={source}") == 0
    [finding] = [each for each in named(tmp_path / "run", "finding") if each.detector == "reward_fault/broken"]
    assert finding.title == "The reward part broken could not judge (ZeroDivisionError in line 2)."
    assert "division by zero" in finding.evidence
    assert named(tmp_path / "run", "warning") == []
    assert [event.dropped for event in named(tmp_path / "run", "trained")] == [{"all_abstained": 4}] * 2


def test_a_run_that_cannot_start_says_why_in_its_journal(tmp_path):
    config = tiny_config(model={"source": "folder", "path": str(tmp_path / "absent")})
    assert run_engine(config, tmp_path / "run") == 2
    [failure] = named(tmp_path / "run", "failed")
    assert failure.reason == "invalid_config"
    assert "model.path" in failure.message
    assert str(tmp_path / "absent") in failure.message


def test_a_missing_reward_file_is_told_before_anything_starts(tmp_path, capfd):
    assert run_engine(tiny_config(), tmp_path / "run", "--reward", f"brevity={tmp_path}/absent.py") == 2
    assert f"{tmp_path}/absent.py" in capfd.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_crash_is_journaled_with_its_traceback(tmp_path):
    config = tiny_config(rl_stage(data={"source": "file", "path": str(write_rows(tmp_path)), "held_out_rows": 8}))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rollouts").write_text("a file where a folder must be")
    assert run_engine(config, folder) == 1
    [failure] = named(folder, "failed")
    assert failure.reason == "engine_crash"
    assert "Traceback" in failure.traceback


def write_rows(folder):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(32)))
    return path


def test_a_file_without_held_out_rows_trains_without_evaluation(tmp_path):
    config = tiny_config(rl_stage(data={"source": "file", "path": str(write_rows(tmp_path))}, num_steps=2))
    assert run_engine(config, tmp_path / "run") == 0
    assert named(tmp_path / "run", "evaluation") == []
    assert len(named(tmp_path / "run", "trained")) == 2


def test_the_resolved_config_is_stored_and_hashes_alike(finished):
    stored = RunConfig.model_validate(json.loads((finished / "config.json").read_text()))
    assert named(finished, "started")[0].config_hash == stored.hash() == tiny_config().hash()
