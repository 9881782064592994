"""Configs as YAML for people: it says the same, and line breaks can be seen."""

import pytest
import yaml

from app.configs.service import presets
from app.yaml_text import flow_text, yaml_text

TEXTS = ["\n\n", "END", " a\nb", "You add.\nThink first.\n", "a: b", "", "no", "tab\tend ", "line\n  indented\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back_as_it_was(text: str) -> None:
    assert yaml.safe_load(yaml_text({"stop": [text], "prompt": text})) == {"stop": [text], "prompt": text}
    assert yaml.safe_load(flow_text([text])) == [text]


def test_line_breaks_can_be_seen() -> None:
    assert yaml_text({"stop": ["\n\n"]}) == 'stop:\n- "\\n\\n"\n'
    assert yaml_text({"prompt": "You add.\nThink first."}) == "prompt: |-\n  You add.\n  Think first.\n"
    assert flow_text("\n") == '"\\n"'
    assert flow_text(None) == "null"


def test_presets_mean_the_same_when_written_anew() -> None:
    for preset in presets():
        data = preset.config.model_dump(mode="json")
        assert yaml.safe_load(yaml_text(data)) == data
