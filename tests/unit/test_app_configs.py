from __future__ import annotations

import pytest

from app.configs.edits import apply_changes
from app.configs.service import MISSING, Change, diff, get_preset, parse, presets, run_config_schema
from app.errors import Invalid, NotFound


def test_a_diff_names_each_leaf_that_differs() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "stages": [{"kind": "sft"}], "gone": True}
    after = {"a": {"b": 2, "c": [1, 2]}, "stages": [{"kind": "sft"}, {"kind": "rl"}]}
    assert diff(before, after) == [
        Change("a.b", 1, 2),
        Change("gone", True, MISSING),
        Change("stages.1.kind", MISSING, "rl"),
    ]


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (0, False), (None, "None"), ([], {})])
def test_values_that_python_calls_equal_still_differ(left: object, right: object) -> None:
    assert diff({"x": left}, {"x": right}) == [Change("x", left, right)]


def test_a_config_does_not_differ_from_itself() -> None:
    data = get_preset("demo").config.model_dump(mode="json")
    assert diff(data, data) == []


def test_changes_reach_into_lists_and_leave_the_original_alone() -> None:
    data = {"stages": [{"optimizer": {"learning_rate": 1.0}}]}
    assert (
        apply_changes(data, {"stages.0.optimizer.learning_rate": 2.0})["stages"][0]["optimizer"]["learning_rate"] == 2
    )
    assert data["stages"][0]["optimizer"]["learning_rate"] == 1.0


@pytest.mark.parametrize("path", ["stages.7.kind", "name.first", "stages.x.kind", ""])
def test_a_change_that_leads_nowhere_names_its_path(path: str) -> None:
    with pytest.raises(Invalid) as refused:
        apply_changes({"name": "a", "stages": [{"kind": "rl"}]}, {path: 1})
    assert refused.value.problems[0].field == path


def test_every_preset_is_a_valid_config_and_says_what_it_is() -> None:
    found = presets()
    assert {"demo", "r1"} <= {preset.name for preset in found}
    assert all(preset.about and parse(preset.yaml) == preset.config for preset in found)
    with pytest.raises(NotFound, match="demo"):
        get_preset("../settings")


def test_the_schema_describes_every_field() -> None:
    schema = run_config_schema()
    fields = [
        (name, field)
        for part in schema["$defs"].values()
        for name, field in part.get("properties", {}).items()
        if "const" not in field and "$ref" not in field and "oneOf" not in field
    ]
    assert [name for name, field in fields if not field.get("description")] == []
