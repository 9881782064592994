"""The README.md of a folder that others load: what made it and how to load it."""

from __future__ import annotations

from grpo_engine.config import RunConfig
from grpo_engine.manifest import AdapterBase, Manifest

CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags: [cohort, reinforcement-learning{tags}]
---
# {title}

Checkpoint of the Cohort run **{title}**: stage `{stage}`, step {step}, policy version {policy_version}.

| | |
|---|---|
| made at | {created_at} |
| model | {model} |
| config hash | `{config_hash}` |
| parent checkpoint | {parent} |
| git commit | {commit} |

{loading}
`trainer/` holds optimizer and progress for resuming; `manifest.json` lists size and SHA-256 of every file.
{metrics}"""

WHOLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
```
"""

ADAPTER = """This folder holds a LoRA adapter and no weights of its base, {base} (SHA-256 `{base_sha256}`).
`cohort checkpoint merge PATH OUT` makes a folder with weights; or load the adapter onto the base:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "PATH/trainer/adapter")
```
"""

MERGED = """---
library_name: transformers
pipeline_tag: text-generation
tags: [cohort, reinforcement-learning]
---
# Merged weights

Base and adapter of the Cohort checkpoint `{checkpoint}` in one: stage `{stage}`, step {step}.

| | |
|---|---|
| base | {base} |
| base's SHA-256 | `{base_sha256}` |
| checkpoint's SHA-256 | `{sha256}` |
| config hash | `{config_hash}` |

{loading}"""


def model_card(config: RunConfig, manifest: Manifest) -> str:
    """Markdown; metrics of the step as a table when there are any."""
    rows = [f"| {name} | {'not finite' if v is None else f'{v:.6g}'} |" for name, v in sorted(manifest.metrics.items())]
    metrics = "\n".join(["", "| metric | value |", "|---|---|", *rows, ""]) if rows else ""
    adapter = manifest.adapter
    return CARD.format(
        library="transformers" if adapter is None else "peft",
        tags="" if adapter is None else ", lora",
        title=" ".join(config.name.split()),
        stage=manifest.stage,
        step=manifest.step,
        policy_version=manifest.policy_version,
        created_at=manifest.created_at.isoformat(timespec="seconds"),
        model=config.model.path if config.model.source == "folder" else "tiny Llama, trained from scratch",
        config_hash=manifest.config_hash,
        parent=f"`{manifest.parent}`" if manifest.parent else "none",
        commit=f"`{manifest.git_commit}`" if manifest.git_commit else "unknown",
        loading=WHOLE if adapter is None else ADAPTER.format(base=adapter.base, base_sha256=adapter.base_sha256),
        metrics=metrics,
    )


def merged_card(checkpoint: str, sha256: str, manifest: Manifest, adapter: AdapterBase) -> str:
    """Markdown for what `merge` makes of the checkpoint whose manifest has that hash."""
    return MERGED.format(
        checkpoint=checkpoint,
        sha256=sha256,
        stage=manifest.stage,
        step=manifest.step,
        base=adapter.base,
        base_sha256=adapter.base_sha256,
        config_hash=manifest.config_hash,
        loading=WHOLE,
    )
