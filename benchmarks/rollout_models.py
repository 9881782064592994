"""Model folders of the rollout benchmark, made once under `COHORT_BENCH_HOME/models`.

None of them is trained. What they sample is fixed by a few weights set by hand; every other weight is multiplied as in
any Llama of the same shape.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.batches import SKEWED_LONGEST, SKEWED_P50, SKEWED_P99, tiny_llama
from benchmarks.peers import bench_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

P99_NORMAL = 2.3263478740408408
"""Quantile 0.99 of the normal distribution."""


# ---------------------------------------------------------------- models that do not end by themselves
def endless(size: str) -> Path:
    """A character Llama of `size` 0.86m (h128, 4 layers) or 3.4m (h256, 4 layers) whose end token has probability 0.

    Every backend then samples exactly as many tokens as it is asked for, whatever it does at end tokens."""
    shapes = {
        "0.86m": {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "intermediate_size": 384},
        "3.4m": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "intermediate_size": 768},
    }
    return _finished(bench_home() / "models" / f"endless-{size}", tiny_llama(f"rollout-{size}", **shapes[size]))


def _finished(folder: Path, origin: Path) -> Path:
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
        forbid_end(model)
        AutoTokenizer.from_pretrained(origin).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def forbid_end(model: Any) -> None:
    """Dimension 0 becomes a constant of the residual stream: every token enters with 2 there and no layer writes to
    it. The end token's row of the (tied) head has -2: its logit lies about 40 nats below the others'."""
    embedding = model.get_input_embeddings().weight
    embedding[:, 0] = 2.0
    embedding[model.config.eos_token_id, 0] = -2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0


# ---------------------------------------------------------------- a model with given lengths
def countdown() -> Path:
    """A Llama (h128, 4 layers) whose first token says how many follow: token k is followed by k - 1, and 0 is the end.

    After the token `start` the length is log-normal with the quantiles of `batches.skewed`. Attention and feed-forward
    layers are computed and add 0, so that a token's successor depends on the token alone."""
    folder = bench_home() / "models" / "countdown-h128x4"
    if not (folder / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        pad, start = SKEWED_LONGEST, SKEWED_LONGEST + 1
        config = LlamaConfig(
            vocab_size=start + 1, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, pad_token_id=pad,
            bos_token_id=start, eos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        set_countdown(model, length_logprobs(SKEWED_LONGEST))
        _number_tokenizer(start + 1).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def length_logprobs(longest: int) -> Tensor:
    """[longest] float32, log-probability that a completion has 1, 2, … tokens, the end token included."""
    sigma = math.log(SKEWED_P99 / SKEWED_P50) / P99_NORMAL
    length = torch.arange(1, longest + 1, dtype=torch.float64)
    density = -length.log() - (length.log() - math.log(SKEWED_P50)).square() / (2 * sigma**2)
    return torch.log_softmax(density, dim=0).float()


@torch.no_grad()
def set_countdown(model: Any, length_logprobs: Tensor) -> None:
    """Write the transitions into embedding and head; the last token of the vocabulary is `start`."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    width, longest = embedding.shape[1], len(length_logprobs)
    embedding.normal_()
    embedding[:, 0] = 0.0
    # Rows of norm sqrt(width) pass the last normalisation unchanged.
    embedding.mul_(math.sqrt(width) / embedding.norm(dim=1, keepdim=True))
    head.zero_()
    head[: longest - 1] = 60.0 / width * embedding[1:longest]  # 60 nats at the successor, less than 30 elsewhere
    embedding[-1] = 0.0
    embedding[-1, 0] = math.sqrt(width)
    head[:, 0] = -100.0 / math.sqrt(width)
    head[:longest, 0] = length_logprobs / math.sqrt(width)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _number_tokenizer(size: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<end>", *(str(index) for index in range(1, size - 2)), "<pad>", "<start>"]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", bos_token="<start>", model_max_length=2048
    )


def parameters(folder: Path) -> int:
    """Weights of a model folder's safetensors, tied ones once; what a token multiplies."""
    from safetensors import safe_open

    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def context_of(folder: Path) -> int:
    found: int = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return found
