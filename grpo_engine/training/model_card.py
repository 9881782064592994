"""The README.md of a checkpoint's root: what made it and how to load it."""

from __future__ import annotations

from grpo_engine.config import RunConfig
from grpo_engine.manifest import Manifest

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [cohort, reinforcement-learning]
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

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
```

`trainer/` holds optimizer and progress for resuming; `manifest.json` lists size and SHA-256 of every file.
{metrics}"""


def model_card(config: RunConfig, manifest: Manifest) -> str:
    """Markdown; metrics of the step as a table when there are any."""
    rows = [f"| {name} | {'not finite' if v is None else f'{v:.6g}'} |" for name, v in sorted(manifest.metrics.items())]
    metrics = "\n".join(["", "| metric | value |", "|---|---|", *rows, ""]) if rows else ""
    return CARD.format(
        title=" ".join(config.name.split()),
        stage=manifest.stage,
        step=manifest.step,
        policy_version=manifest.policy_version,
        created_at=manifest.created_at.isoformat(timespec="seconds"),
        model=config.model.path if config.model.source == "folder" else "tiny Llama, trained from scratch",
        config_hash=manifest.config_hash,
        parent=f"`{manifest.parent}`" if manifest.parent else "none",
        commit=f"`{manifest.git_commit}`" if manifest.git_commit else "unknown",
        metrics=metrics,
    )
