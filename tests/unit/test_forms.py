"""The form generated from the config's schema, and the way back."""

from typing import Any

import pytest

from app.forms import Choice, Items, Leaf, SchemaForm, Section
from grpo_engine.config import RunConfig

FORM = SchemaForm(RunConfig.model_json_schema())
CONFIG = RunConfig.model_validate(
    {
        "name": "a, b <c>",
        "tags": ["x", "y"],
        "model": {"source": "folder", "path": "/m"},
        "stages": [
            {"kind": "sft", "data": {"source": "addition"}},
            {
                "kind": "rl",
                "data": {"source": "reasoning_gym", "task": "chain_sum", "options": {"min_terms": 2}},
                "rewards": [{"kind": "accuracy"}, {"kind": "length", "max_tokens": 40, "buffer_tokens": 10}],
                "optimizer": {"learning_rate": 3e-6},
            },
        ],
    }
).model_dump(mode="json")


def posted(node: Any) -> dict[str, str]:
    """What a browser would send for the rendered form."""
    if isinstance(node, Leaf):
        return {} if node.kind == "checkbox" and not node.value else {node.path: node.value}
    fields: dict[str, str] = {}
    if isinstance(node, Items):
        fields[f"{node.path}.length"] = str(len(node.items))
    if isinstance(node, Choice):
        fields[f"{node.path}.{node.key}"] = node.value
    for child in node.items if isinstance(node, Items) else node.children:
        fields |= posted(child)
    return fields


def find(section: Section, path: str) -> Any:
    stack: list[Any] = [section]
    while stack:
        node = stack.pop()
        if node.path == path and node is not section:
            return node
        stack += getattr(node, "children", []) + getattr(node, "items", [])
    raise KeyError(path)


def test_a_config_survives_the_way_through_the_form() -> None:
    data = FORM.parse(posted(FORM.build(CONFIG)))
    assert RunConfig.model_validate(data).model_dump(mode="json") == CONFIG


def test_a_field_carries_its_description_as_help_and_knows_when_it_was_changed() -> None:
    leaf = find(FORM.build(CONFIG), "stages.1.optimizer.learning_rate")
    assert "AdamW" in leaf.help
    assert (leaf.value, leaf.default, leaf.changed, leaf.kind) == ("3e-06", "1e-06", True, "number")
    assert find(FORM.build(CONFIG), "stages.1.optimizer").num_changed == 1


def test_an_error_is_shown_at_its_field_and_opens_its_section() -> None:
    tree = FORM.build(CONFIG, {"stages.1.sampling.top_k": "must be at least 0"})
    assert find(tree, "stages.1.sampling.top_k").error == "must be at least 0"
    assert find(tree, "stages.1.sampling").has_error
    assert not find(tree, "stages.1.optimizer").has_error


@pytest.mark.parametrize(("text", "value"), [("abc", "abc"), ("1e-3", 1e-3), ("7", 7), ("−3", -3)])
def test_text_that_is_no_number_stays_text_so_that_the_schema_names_it(text: str, value: object) -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.kl.weight": text}
    assert FORM.parse(fields)["stages"][1]["kl"]["weight"] == value


def test_an_emptied_field_takes_its_default_and_a_nullable_one_none() -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.group_size": "", "num_threads": ""}
    data = FORM.parse(fields)
    assert "group_size" not in data["stages"][1]
    assert data["num_threads"] is None


def test_another_kind_shows_another_form() -> None:
    fields = posted(FORM.build(CONFIG)) | {"stages.1.data.source": "file", "stages.1.data.path": "/d.jsonl"}
    choice = find(FORM.build(FORM.parse(fields)), "stages.1.data")
    assert choice.value == "file"
    assert [leaf.value for leaf in choice.leaves if leaf.path.endswith(".path")] == ["/d.jsonl"]


def test_a_blank_item_is_of_the_kind_asked_for() -> None:
    assert FORM.blank("stages", "rl") == {"kind": "rl"}
    assert FORM.blank("stages.1.rewards", "length") == {"kind": "length"}
    with pytest.raises(KeyError):
        FORM.blank("nonsense", "rl")
