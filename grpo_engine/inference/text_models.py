"""Frozen models that read whole texts: their folders, tokens and limits. Local files and safetensors only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from grpo_engine.errors import RewardError
from grpo_engine.model.loading import context_tokens

MAX_CHARACTERS_PER_TOKEN = 64
"""Of a text, this many characters for each token of the context are tokenized; the model could read no more."""
VERSIONED = ("config.json", "tokenizer.json", "vocab.txt", "*.safetensors")


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model in evaluation mode without gradients, and what is needed to feed it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    max_tokens: int
    """Longest text, special tokens included."""
    version: str
    """First 8 hexadecimal digits of SHA-256 over config, tokenizer and weights."""

    def plain(self, text: str) -> tuple[str, bool]:
        """The text as it may be tokenized, and whether its end was left out.

        The tokenizer's special tokens become spaces: written in a completion they would be obeyed. Half characters
        (lone surrogates), which tokenizers refuse, become question marks."""
        most = self.max_tokens * MAX_CHARACTERS_PER_TOKEN
        shown = text[:most].encode("utf-8", "replace").decode("utf-8")
        names = [str(token) for token in self.tokenizer.all_special_tokens if token]
        if names:
            shown = re.sub("|".join(map(re.escape, names)), " ", shown)
        return shown, len(text) > most


def load_text_model(folder: str, auto: Any, *, dtype: str, device: torch.device) -> TextModel:
    """`auto`: the transformers class that loads it. Raises RewardError when the folder is not such a model, or lacks
    some of its weights: a score of random weights is worse than none."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RewardError(f"the model folder {folder} has no config.json; give a folder that {auto.__name__} loads")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model, report = auto.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the library raises a dozen types for a bad folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise RewardError(f"the model folder {folder} cannot be loaded by {auto.__name__}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise RewardError(f"the model folder {folder} has only a slow tokenizer; save the fast one (tokenizer.json)")
    absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    absent = [name for name in absent if auto.__name__ != "AutoModel" or not name.startswith("pooler.")]
    if absent:
        raise RewardError(
            f"the weights in {folder} lack {', '.join(absent[:3])}, which would be random; give a folder that was "
            f"saved by the class that {auto.__name__} loads"
        )
    model.requires_grad_(False)
    model.eval()
    model.to(device)
    tokenizer.truncation_side = "right"
    return TextModel(model, tokenizer, _most_tokens(model, tokenizer), _version(path))


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, T] ids, padded on the right, and [B, T] int64 mask, 1 = real token."""
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
    mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids_BT, mask_BT


def _most_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """RoBERTa and its kin count positions from behind their padding index."""
    limit = context_tokens(model, tokenizer)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = min(limit, module.num_embeddings - module.padding_idx - 1)
    return limit


def _version(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in VERSIONED for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:8]
