"""Single fields of a form: texts one a line, switches that may be left open."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.form_fields import MISSING, choices_of, kind_of, leaf_value, text_of

LINES = {"type": "array", "items": {"type": "string"}, "format": "lines"}
OPEN_SWITCH = {"type": "boolean", "nullable": True}


@given(st.lists(st.text(min_size=1), max_size=4))
def test_texts_survive_the_way_through_a_text_area(texts: list[str]) -> None:
    shown = text_of(LINES, texts)
    as_browsers_send_it = shown.replace("\n", "\r\n")
    assert leaf_value(LINES, "stop", {"stop": as_browsers_send_it}) == texts


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("END\n\n", ["END"]),
        (" a, b ", [" a, b "]),
        (r"\n\n", ["\n\n"]),
        (r"\boxed", [r"\boxed"]),
        (r"\\nabla", [r"\nabla"]),
        ("a\\", ["a\\"]),
        ("", []),
    ],
)
def test_a_backslash_n_is_a_line_break_and_spaces_count(typed: str, meant: list[str]) -> None:
    assert leaf_value(LINES, "stop", {"stop": typed}) == meant


@pytest.mark.parametrize("value", [True, False, None])
def test_a_switch_that_may_be_left_open_has_three_states(value: bool | None) -> None:
    assert (kind_of(OPEN_SWITCH), choices_of(OPEN_SWITCH)) == ("select", ["true", "false"])
    assert leaf_value(OPEN_SWITCH, "x", {"x": text_of(OPEN_SWITCH, value)}) is value


@pytest.mark.parametrize(("posted", "value"), [({"x": "maybe"}, "maybe"), ({}, MISSING)])
def test_what_is_no_choice_stays_text_so_that_the_schema_names_it(posted: dict[str, str], value: Any) -> None:
    assert leaf_value(OPEN_SWITCH, "x", posted) == value
