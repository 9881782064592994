"""Configs as YAML text for people: texts of several lines as blocks, line breaks at a text's ends written as \\n."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Without this, a text of line breaks is written as empty lines between quotes."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|" if text.strip() and not text.startswith(("\n", " ")) and "\n" in text.rstrip("\n") else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Example: yaml_text({"stop": ["a", "b"]}) == "stop:" and the texts below it, one a line."""
    return str(yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def flow_text(value: Any) -> str:
    """One value in one line. Example: flow_text(["a", 1]) == "[a, 1]"."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True)
    return str(text).replace("\n...", "").strip()
