"""The same code on a real model: SmolLM2-135M-Instruct from its package, RL only, on reasoning-gym prompts."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from grpo_engine.communicator import SingleRank
from grpo_engine.config import FolderModel, RunConfig
from grpo_engine.config_training import KLConfig, MemoryConfig
from grpo_engine.model.loading import load_policy
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.types import TrainRow
from tests.engine_process import named, newest_checkpoint, run_engine

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, "-m", "grpo_engine", "import-smollm2", "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def trained(model_folder, tmp_path_factory):
    data = yaml.safe_load(Path("configs/smollm2-gym.yaml").read_text())
    data["model"]["path"] = str(model_folder)
    folder = tmp_path_factory.mktemp("smollm2-run") / "run"
    assert run_engine(RunConfig.model_validate(data), folder, seconds=3000) == 0
    return folder


def rollout_rows(folder, batch):
    table = pq.read_table(folder / named(folder, "rollouts")[batch].path)
    return [
        TrainRow(
            row["prompt_token_ids"], row["token_ids"], row["advantage"], row["logprobs"], None, row["ref_logprobs"]
        )
        for row in table.to_pylist()
    ]


def test_a_third_of_the_groups_have_reward_variance(trained):
    shares = [event.values["groups/zero_variance_share"] for event in named(trained, "metrics")]
    assert len(shares) == 20
    assert sum(shares) / len(shares) <= 0.7


def test_the_ratio_is_one_where_old_is_the_trainers_own_forward(model_folder, trained):
    policy = load_policy(FolderModel(path=str(model_folder)), seed=0, dtype="float32", device=torch.device("cpu"))
    objective = PolicyObjective(temperature=1.0, kl=KLConfig(track=False), old_logprobs="sampler")
    optimizer = RunConfig.model_validate(json.loads((trained / "config.json").read_text())).stages[0].optimizer
    learner = TorchLearner(
        policy.model,
        optimizer,
        num_steps=1,
        objective=objective,
        memory=MemoryConfig(max_micro_batch_tokens=2048),
        communicator=SingleRank(),
        dtype="float32",
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    rows = rollout_rows(trained, 0)
    learner.accumulate(rows, 1.0)
    assert learner.discard()["policy/ratio_mean"] == pytest.approx(1, abs=1e-3)
    olds = learner.logprobs(rows)
    own = [TrainRow(r.prompt_ids, r.completion_ids, r.advantage, old, old) for r, old in zip(rows, olds, strict=True)]
    learner.accumulate(own, 1.0)
    assert learner.discard()["policy/ratio_mean"] == 1


def test_the_weights_changed_and_reload_in_a_fresh_process(model_folder, trained):
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "before, after = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in sys.argv[1:3])\n"
        "pairs = list(zip(before.parameters(), after.parameters(), strict=True))\n"
        "assert all(p.shape == q.shape for p, q in pairs)\n"
        "assert any(not torch.equal(p, q) for p, q in pairs)\n"
        "ids = AutoTokenizer.from_pretrained(sys.argv[2])('What is 2 + 3?', return_tensors='pt')\n"
        "assert after.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids['input_ids'].shape[1]\n"
    )
    subprocess.run([sys.executable, "-c", code, str(model_folder), str(newest_checkpoint(trained))], check=True)
