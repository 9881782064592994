"""`python -m grpo_engine merge-checkpoint CHECKPOINT --out DIR`: adapter and base of a LoRA checkpoint in one folder.

The folder is what `AutoModelForCausalLM.from_pretrained`, vLLM and a config's `model.path` load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from grpo_engine.config import FolderModel
from grpo_engine.errors import CheckpointInvalid, EngineError, InvalidConfig, Problem, StorageFull
from grpo_engine.manifest import AdapterBase, Manifest, manifest_sha256, verify
from grpo_engine.model.adapters import add_adapter, base_hash, load_adapter_tensors, merge_in_place, read_adapter
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.resume import check_base
from grpo_engine.training.checkpoint import ADAPTER, ASIDE, TRAINER, sync_tree
from grpo_engine.training.model_card import merged_card


def merge_checkpoint(checkpoint: Path, out: Path, base: Path | None = None) -> None:
    """Write the merged model, float32, to `out`, which must not exist; written aside and renamed.

    `base` is where the base lies now, if not where it was. Raises CheckpointInvalid when the checkpoint is damaged, has
    no adapter or the base is another one, InvalidConfig when `out` exists or the base cannot be loaded, StorageFull
    when `out` cannot be written."""
    aside = out.with_name(out.name + ASIDE)
    for path in (out, aside):
        if path.exists():
            problem = Problem("--out", str(path), "exists already", "give a new folder, or remove it first")
            raise InvalidConfig([problem])
    manifest = verify(checkpoint)
    if manifest.adapter is None:
        raise CheckpointInvalid(f"{checkpoint} has no adapter to merge: its folder is loadable as it is")
    policy = _merged_policy(checkpoint, manifest, manifest.adapter, base)
    try:
        aside.mkdir(parents=True)
        policy.model.save_pretrained(aside)
        policy.tokenizer.save_pretrained(aside)
        card = merged_card(str(checkpoint), manifest_sha256(checkpoint), manifest, manifest.adapter)
        (aside / "README.md").write_text(card, encoding="utf-8")
        sync_tree(aside)
        os.rename(aside, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StorageFull(f"{out} cannot be written: {error}; free space or choose another folder") from error


def _merged_policy(checkpoint: Path, manifest: Manifest, adapter: AdapterBase, base: Path | None) -> Policy:
    model = adapter.model if base is None else FolderModel(path=str(base))
    policy = load_policy(model, seed=adapter.seed, dtype="float32", device=torch.device("cpu"))
    check_base(manifest, base_hash(policy.model), str(base or adapter.base), checkpoint)
    config, tensors = read_adapter(checkpoint / TRAINER / ADAPTER)
    add_adapter(policy, config, seed=0)
    load_adapter_tensors(policy.model, tensors)
    merge_in_place(policy.model)
    return policy


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m grpo_engine merge-checkpoint`."""
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint with an adapter")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--base", type=Path, help="folder of the base, when it is no longer where it was")


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 written, 1 refused or failed; the reason goes to standard error."""
    try:
        merge_checkpoint(arguments.checkpoint, arguments.out, arguments.base)
    except EngineError as error:
        fields = {problem.field for problem in getattr(error, "problems", ())}
        hint = "; --base tells where the base lies now" if "model.path" in fields else ""
        print(f"{error}{hint}", file=sys.stderr)
        return 1
    print(f"{arguments.out} holds the merged model")
    return 0
