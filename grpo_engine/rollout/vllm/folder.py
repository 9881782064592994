"""The folder that vLLM starts a model from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_engine.model.adapters import merged_weights


def write_model_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, weights: bool
) -> None:
    """Write config and tokenizer into `folder`, and with `weights` the present weights, adapters merged in.

    Without them vLLM starts on random ones and waits for the first update, which saves writing and reading them. A
    draft head (eagle) is read the same way as the policy: it needs `weights`. MTP heads that come with a checkpoint are
    in that checkpoint's own folder alone: start vLLM there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if weights:
        tensors = {name: tensor.detach().cpu() for name, tensor in merged_weights(model)}
        model.save_pretrained(folder, state_dict=tensors)
        return
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
