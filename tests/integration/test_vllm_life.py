"""vLLM in this process starts and ends. Apart from the other tests: one engine that ends takes the process groups of
every other in its process with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_engine.config_rollout import VLLMRollout
from grpo_engine.rollout.vllm.sampler import VLLMSampler
from tests.sampling import requests, settings
from tests.vllm_models import CONTEXT, EOS, TOKENIZER, of_vllm, plain_logits, vllm_model, write_folder

pytestmark = of_vllm


def test_starting_leaves_the_trainers_random_numbers_and_threads(tmp_path: Path) -> None:
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    folder = write_folder(vllm_model("llama"), tmp_path)
    before = torch.get_rng_state()
    sampler = VLLMSampler(VLLMRollout(), folder, TOKENIZER, {EOS}, CONTEXT)
    assert torch.equal(before, torch.get_rng_state())
    assert (threads, setter) == (torch.get_num_threads(), torch.set_num_threads)
    with pytest.raises(RuntimeError, match="load_weights"):
        sampler.sample(requests(["1"]), settings())
    sampler.close()


def test_another_engine_starts_on_a_folder_with_weights_and_samples_at_once(tmp_path: Path) -> None:
    model = vllm_model("llama")
    sampler = VLLMSampler(VLLMRollout(), write_folder(model, tmp_path, weights=True), TOKENIZER, {EOS}, CONTEXT)
    [request] = requests(["12*(3+4)="])
    [completion] = sampler.sample([request], settings(temperature=0))
    assert completion.token_ids == plain_logits(model, request.prompt_ids, completion).argmax(-1).tolist()
    sampler.close()
    sampler.close()
    with pytest.raises(RuntimeError, match="closed"):
        sampler.sample([request], settings())
