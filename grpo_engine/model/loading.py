"""Policies from a config: a freshly initialised tiny Llama, or a Hugging Face folder. Local files and safetensors only.

Parameters are float32 whatever the run's dtype: they are the masters that the optimizer updates; `dtype` is the type
of the forward pass and belongs to learner and sampler.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo_engine.config import FolderModel, ModelConfig, TinyLlamaModel
from grpo_engine.errors import InvalidConfig, Problem
from grpo_engine.model.mtp import MTPHeads
from grpo_engine.model.tokenizer import character_tokenizer

UNLIMITED_TOKENS = 1 << 20
"""Context of a model whose config states none (ALiBi and the like)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with what is needed to sample from it and train it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    end_token_ids: frozenset[int]
    """Every id that ends a completion: generation config, model config and tokenizer together."""
    max_context_tokens: int
    """Longest prompt plus completion. With LongRoPE (Phi) that of its short form: one longer row would change the
    rotations of every row in its batch, and log-probabilities must not depend on the batch."""
    device: torch.device
    base_sha256: str | None = None
    """`adapters.base_hash` of the model before it got an adapter; None without one, or where nobody asked yet."""
    mtp: MTPHeads | None = None
    """Heads that draft for this policy, no part of `model`; None where the config wants none."""


def load_policy(config: ModelConfig, *, seed: int, dtype: str, device: torch.device) -> Policy:
    """Build or load the policy, float32 parameters on `device`, in training mode.

    Raises InvalidConfig naming `model.path` when the folder is missing, incomplete or of another kind, and naming
    `dtype` when the device cannot compute in it.
    """
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        remedy = "use dtype float32 or a device with bfloat16"
        raise InvalidConfig([Problem("dtype", dtype, f"{torch.cuda.get_device_name(device)} lacks bfloat16", remedy)])
    if isinstance(config, TinyLlamaModel):
        return _tiny_llama(config, seed, device)
    return _folder(config, device)


def clone_frozen(policy: Policy) -> PreTrainedModel:
    """A copy of the policy's model without gradients, in evaluation mode: the reference."""
    reference: PreTrainedModel = copy.deepcopy(policy.model)
    reference.requires_grad_(False)
    reference.train(False)
    return reference


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """All end ids of the model that it can sample. Chat models often have two: end of turn and end of text."""
    sources = (getattr(model.generation_config, "eos_token_id", None), model.config.get_text_config().eos_token_id)
    found: set[int] = set()
    for ids in (*sources, tokenizer.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(index for index in found if 0 <= index < model.config.get_text_config().vocab_size)


# ---------------------------------------------------------------- tiny Llama
def _tiny_llama(config: TinyLlamaModel, seed: int, device: torch.device) -> Policy:
    tokenizer = character_tokenizer(config.max_context_tokens)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_context_tokens,
        initializer_range=config.initializer_std,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        # Drawn on the CPU, so that every device starts from the same weights.
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(llama)  # type: ignore[no-untyped-call]
    return _policy(_moved(model, device), tokenizer, config.max_context_tokens, device)


# ---------------------------------------------------------------- folder
def _folder(config: FolderModel, device: torch.device) -> Policy:
    folder = Path(config.path)
    _require_files(folder)
    tokenizer = _load_tokenizer(folder)
    model = _load_model(folder)
    vocab_size = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size}"
        raise _unusable(folder, message, "use the tokenizer that the model was trained with")
    if tokenizer.pad_token_id is None:
        # Padding never reaches the loss (masks are built from lengths), so any id will do; none is added to the model.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return _policy(_moved(model, device), tokenizer, context_tokens(model, tokenizer), device)


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise _unusable(folder, what, "give the folder of a Hugging Face model (`cohort model import` makes one)")
    present = sorted(entry.name for entry in folder.iterdir())
    there = f"it holds {', '.join(present[:8])}" if present else "it is empty"
    if "config.json" not in present:
        raise _unusable(folder, f"has no config.json ({there})", "give the folder that holds config.json")
    if (folder / "trainer" / "adapter").is_dir():
        remedy = "make a folder with weights of it: `cohort checkpoint merge CHECKPOINT OUT`"
        raise _unusable(folder, "is a checkpoint of an adapter, without its base's weights", remedy)
    if not any(name.endswith(".safetensors") for name in present):
        remedy = "convert the weights with save_pretrained; pickled weights are not read"
        raise _unusable(folder, f"has no .safetensors file ({there})", remedy)
    if not {"tokenizer.json", "tokenizer_config.json"} & set(present):
        raise _unusable(folder, f"has no tokenizer ({there})", "save the tokenizer into the folder (save_pretrained)")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _unusable(folder, f"config.json cannot be read: {error}", "restore config.json") from error


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises a dozen types for a bad folder
        raise _unusable(folder, f"its tokenizer cannot be loaded: {_first_line(error)}", "save it again") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _unusable(folder, "has only a slow tokenizer", "save the fast one (tokenizer.json) into the folder")
    return tokenizer


def _load_model(folder: Path) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # as above
        message = f"cannot be loaded as a causal language model: {_first_line(error)}"
        raise _unusable(folder, message, "use a folder that AutoModelForCausalLM.from_pretrained loads") from error
    model: PreTrainedModel
    model, report = loaded
    absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if absent:
        message = f"its weights lack {len(absent)} of the model's tensors, {', '.join(absent[:3])} among them"
        raise _unusable(folder, message, "use complete weights; missing ones would be random")
    _make_saveable(model, folder)
    model.train()
    return model


def _make_saveable(model: PreTrainedModel, folder: Path) -> None:
    """Many folders state a temperature without do_sample: the library loads that and refuses to save it."""
    generation: Any = model.generation_config
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
        try:
            generation.validate(strict=True)
        except ValueError as error:
            message = f"its generation_config.json is invalid: {' '.join(str(error).split())[:300]}"
            raise _unusable(folder, message, "correct it: no checkpoint could be saved with it") from error


def context_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """Most tokens that model and tokenizer state to hold; UNLIMITED_TOKENS where neither states any."""
    text_config: Any = model.config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits: Iterable[object] = (
        rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None,
        getattr(text_config, "max_position_embeddings", None),
        getattr(text_config, "n_positions", None),
        tokenizer.model_max_length,
    )
    stated = [limit for limit in limits if isinstance(limit, int) and 0 < limit < UNLIMITED_TOKENS]
    return min(stated, default=UNLIMITED_TOKENS)


# ---------------------------------------------------------------- shared
def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    torch.nn.Module.to(model, device)
    return model


def _policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_context_tokens: int, device: torch.device
) -> Policy:
    ends = end_token_ids(model, tokenizer)
    if not ends:
        remedy = "set eos_token_id in generation_config.json"
        raise InvalidConfig([Problem("model.path", str(model.name_or_path), "the model has no end token", remedy)])
    return Policy(model, tokenizer, ends, max_context_tokens, device)


def _unusable(folder: Path, message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([Problem("model.path", str(folder)[:200], message, remedy)])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
