"""How numbers, times and names are written."""

from datetime import UTC, datetime, timedelta

import pytest

from app import formatting as f


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.8712, "0.871"), (28.06, "28.1"), (8940.2, "8,940"), (-4e-7, "−4e−7"), (1.0, "1.00"), (0.0, "0"), (12, "12"),
     (None, "–"), (float("nan"), "NaN"), (float("-inf"), "−Inf"), (-0.5, "−0.500"), (0.99999, "1.00")],
)  # fmt: skip
def test_a_number_has_three_digits_and_a_true_minus(value: float | None, text: str) -> None:
    assert f.number(value) == text


def test_signs_shares_sizes_and_durations() -> None:
    assert [f.signed(0.72), f.signed(-1.234), f.signed(-0.0001)] == ["+0.72", "−1.23", "0.00"]
    assert [f.percent(0.31), f.percent(0.009), f.percent(None)] == ["31 %", "0.9 %", "–"]
    assert [f.size(3_650_000), f.size(12), f.size(0)] == ["3.65 MB", "12 B", "0 B"]
    assert [f.duration(69), f.duration(0.7), f.duration(7500), f.duration(200_000)] == [
        "1 m 09 s",
        "0.7 s",
        "2 h 05 m",
        "2 d 7 h",
    ]


def test_a_long_name_is_cut_in_its_middle_and_escaped() -> None:
    name = "<b>" + "x" * 60 + "&end"
    cut = f.middle(name, 20)
    assert "&lt;b&gt;xxx" in cut
    assert "…" in cut
    assert "&amp;end" in cut
    assert "<b>" not in cut


def test_an_age_never_lies_in_the_future() -> None:
    now = datetime(2026, 11, 29, 12, tzinfo=UTC)
    assert f.age_text(now + timedelta(seconds=5), now) == "just now"
    assert f.age_text(now - timedelta(seconds=42), now) == "42 s ago"
    assert f.age_text(now - timedelta(hours=3), now) == "3 h ago"


def test_a_sparkline_breaks_at_missing_values() -> None:
    path = f.spark_path([1.0, 2.0, None, 2.0, float("nan"), 3.0, 1.0])
    assert path.count("M") == 3
    assert f.spark_path([1.0]) == ""
    assert f.spark_path([2.0, 2.0]).count("L") == 1
