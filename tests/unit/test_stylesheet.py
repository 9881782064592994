"""Text can be read in both colour schemes: contrast AA (WCAG 2.2, 1.4.3) of every ink on every ground."""

import re
from pathlib import Path

import pytest

CSS = (Path(__file__).parents[2] / "app/static/cohort.css").read_text()
PAIRS = dict(re.findall(r"--([\w-]+): light-dark\(([^)]+)\)", CSS))
INKS = ["ink", "dim", "accent", "good", "warn", "bad", "run"]
GROUNDS = ["bg", "panel", "fill"]


def colour(name: str, scheme: int) -> tuple[float, float, float]:
    text = PAIRS[name].split(",")[scheme].strip().lstrip("#")
    red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return red, green, blue


def luminance(rgb: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ink", INKS)
def test_every_ink_can_be_read_on_every_ground(ink: str, scheme: int) -> None:
    for ground in GROUNDS:
        assert contrast(colour(ink, scheme), colour(ground, scheme)) >= 4.5, ground


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("tone", ["good", "warn", "bad", "run"])
def test_a_pill_can_be_read_on_its_own_tint(tone: str, scheme: int) -> None:
    ink, panel = colour(tone, scheme), colour("panel", scheme)
    tint = tuple(0.13 * a + 0.87 * b for a, b in zip(ink, panel, strict=True))
    assert contrast(ink, (tint[0], tint[1], tint[2])) >= 4.5


def test_the_main_button_can_be_read() -> None:
    assert all(contrast(colour("on-accent", s), colour("accent", s)) >= 4.5 for s in (0, 1))
