"""The policy as far as it can be known without loading it: shape, size, context, tokenizer. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_engine.checks.report import Report
from grpo_engine.checks.tokenizer import LightTokenizer, character_tokenizer, folder_tokenizer
from grpo_engine.config import ModelConfig, TinyLlamaModel

UNLIMITED_TOKENS = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and lengths depend on."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int
    head_size: int
    vocabulary_size: int
    max_context_tokens: int
    num_heads: int


def inspect_model(config: ModelConfig, report: Report) -> tuple[ModelShape | None, LightTokenizer | None]:
    """Shape and tokenizer; None for what cannot be known, with the problem in the report."""
    if isinstance(config, TinyLlamaModel):
        own = character_tokenizer()
        return _tiny_shape(config, len(own)), own
    folder = Path(config.path)
    if not _has_files(folder, report):
        return None, None
    tokenizer = _tokenizer(folder, report)
    shape = _folder_shape(folder, report)
    if shape and tokenizer and len(tokenizer) > shape.vocabulary_size > 0:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model only {shape.vocabulary_size}"
        report.refuse("model.path", folder, message, "use the tokenizer that the model was trained with")
    return shape, tokenizer


def _tiny_shape(config: TinyLlamaModel, vocabulary_size: int) -> ModelShape:
    """A Llama with tied embeddings: V h + L (4 h^2 + 3 h i + 2 h) + h parameters."""
    h, i = config.hidden_size, config.intermediate_size
    return ModelShape(
        num_parameters=vocabulary_size * h + config.num_layers * (4 * h * h + 3 * h * i + 2 * h) + h,
        num_layers=config.num_layers,
        hidden_size=h,
        intermediate_size=i,
        num_kv_heads=config.num_heads,
        head_size=h // config.num_heads,
        vocabulary_size=vocabulary_size,
        max_context_tokens=config.max_context_tokens,
        num_heads=config.num_heads,
    )


def _has_files(folder: Path, report: Report) -> bool:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        remedy = "give the folder of a Hugging Face model (`cohort model import` makes one)"
        report.refuse("model.path", folder, f"the model folder {what}", remedy)
        return False
    names = {entry.name for entry in folder.iterdir()}
    missing = []
    if "config.json" not in names:
        missing.append(("the folder has no config.json", "give the folder that holds config.json"))
    if not any(name.endswith(".safetensors") for name in names):
        pickled = sorted(name for name in names if name.endswith(_PICKLED))
        what = f", only pickled weights ({', '.join(pickled[:3])})" if pickled else ""
        remedy = "convert the weights with save_pretrained; pickled weights are never read"
        missing.append((f"the folder has no .safetensors file{what}", remedy))
    if not {"tokenizer.json", "tokenizer_config.json"} & names:
        missing.append(("the folder has no tokenizer", "save the tokenizer into the folder (save_pretrained)"))
    for message, remedy in missing:
        report.refuse("model.path", folder, message, remedy)
    return not missing


def _tokenizer(folder: Path, report: Report) -> LightTokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        message = "without tokenizer.json prompts cannot be rendered and counted here"
        report.warn("model.path", folder, message, "save the fast tokenizer into the folder")
        return None
    try:
        return folder_tokenizer(folder)
    except ValueError as error:
        report.refuse("model.path", folder, str(error), "save the tokenizer again")
        return None


def _folder_shape(folder: Path, report: Report) -> ModelShape | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        num_parameters = sum(_count_parameters(path) for path in sorted(folder.glob("*.safetensors")))
        return _shape_of(config, num_parameters, folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        message = f"config.json or the weights cannot be read: {type(error).__name__}: {error}"
        report.refuse("model.path", folder, message, "save the model again with save_pretrained")
        return None


def _shape_of(config: Mapping[str, Any], num_parameters: int, folder: Path) -> ModelShape:
    heads = int(config.get("num_attention_heads") or config["n_head"])
    hidden = int(config.get("hidden_size") or config["n_embd"])
    return ModelShape(
        num_parameters=num_parameters,
        num_layers=int(config.get("num_hidden_layers") or config["n_layer"]),
        hidden_size=hidden,
        intermediate_size=int(config.get("intermediate_size") or 4 * hidden),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        vocabulary_size=int(config["vocab_size"]),
        max_context_tokens=_context(config, folder),
        num_heads=heads,
    )


def _context(config: Mapping[str, Any], folder: Path) -> int:
    """As `model.loading` finds it."""
    stated = [config.get("max_position_embeddings"), config.get("n_positions")]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
        short = "original_max_position_embeddings"
        stated.append(rope.get(short) or config.get(short))
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        stated.append(json.loads(settings.read_text(encoding="utf-8")).get("model_max_length"))
    return min((int(n) for n in stated if n and 0 < n < UNLIMITED_TOKENS), default=UNLIMITED_TOKENS)


def _count_parameters(path: Path) -> int:
    """Parameters of a safetensors file, read from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
