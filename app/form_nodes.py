"""What a config form is made of: fields, sections, choices of one form among several, lists; and their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KIND_LABELS = {
    "grpo": "GRPO", "seed_paper": "seed papers", "dr_grpo": "Dr. GRPO", "rloo": "RLOO", "gae": "GAE (PPO)",
    "clip": "clip (PPO, GRPO, DAPO)", "gspo": "GSPO", "cispo": "CISPO", "lora": "LoRA", "rl": "RL", "sft": "SFT",
    "tiny_llama": "tiny Llama", "reasoning_gym": "reasoning-gym", "torch": "own decoder", "vllm": "vLLM in process",
    "vllm_server": "vLLM servers", "ngram": "n-gram", "mtp": "MTP heads",
}  # fmt: skip
"""Kind -> what people call it, where that is not its name with spaces."""
ACRONYMS = {
    "kl": "KL", "gae": "GAE", "lora": "LoRA", "logprobs": "log-probabilities", "value": "value model", "mtp": "MTP",
    "cpu": "CPU", "gib": "GiB", "len": "length",
}  # fmt: skip
GIVEN = "given"
"""Stands for the switch of a section that may be absent, where a choice has the field that tells its kinds apart."""


@dataclass(frozen=True)
class Leaf:
    path: str
    label: str
    help: str
    kind: str
    """text, number, checkbox, select, words (comma-separated), lines (texts, one a line) or json."""
    value: str
    choices: list[str] = field(default_factory=list)
    required: bool = False
    nullable: bool = False
    default: str = ""
    changed: bool = False
    error: str = ""
    node: str = "leaf"

    @property
    def id(self) -> str:
        return "f-" + self.path.replace(".", "-")


@dataclass(frozen=True)
class Section:
    path: str
    label: str
    help: str
    children: list[Any]
    error: str = ""
    node: str = "section"

    @property
    def leaves(self) -> list[Leaf]:
        return [child for child in self.children if child.node == "leaf"]

    @property
    def nested(self) -> list[Any]:
        return [child for child in self.children if child.node != "leaf"]

    @property
    def num_changed(self) -> int:
        return sum(leaf.changed for leaf in self.leaves) + sum(getattr(c, "num_changed", 0) for c in self.nested)

    @property
    def has_error(self) -> bool:
        return bool(self.error) or any(c.error if c.node == "leaf" else c.has_error for c in self.children)


@dataclass(frozen=True)
class Choice(Section):
    """One of several forms, told apart by the value of the field `key`."""

    key: str = ""
    value: str = ""
    choices: list[str] = field(default_factory=list)
    changed: bool = False
    """Another kind than the default's."""
    node: str = "choice"

    @property
    def key_label(self) -> str:
        return self.label if self.key == GIVEN else label(self.key)

    @property
    def num_changed(self) -> int:
        return self.changed + super().num_changed


@dataclass(frozen=True)
class Items:
    path: str
    label: str
    help: str
    items: list[Any]
    choices: list[str]
    error: str = ""
    node: str = "items"
    num_changed: int = 0

    @property
    def has_error(self) -> bool:
        return bool(self.error) or any(item.has_error for item in self.items)


def kind_label(kind: str) -> str:
    """Example: kind_label("gae") == "GAE (PPO)"."""
    return KIND_LABELS.get(kind, kind.replace("_", " "))


def label(name: str) -> str:
    return " ".join(ACRONYMS.get(word, word) for word in name.split("_"))
