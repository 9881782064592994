"""How numbers, times and names are written for people: template filters, pure functions.

Three digits, a true minus sign, a unit; a missing number is an en dash, a non-finite one its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup, escape

MISSING = "–"
MINUS = "−"


def number(value: float | int | None) -> str:
    """Example: number(0.8712) == "0.871", number(8940.2) == "8,940", number(4e-7) == "4e−7"."""
    if value is None:
        return MISSING
    if isinstance(value, int) or value == 0:
        return _minus(f"{value:,.0f}")
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else f"{MINUS}Inf"
    size = abs(value)
    if size < 9.995e-4:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", MINUS)
    decimals = 3 if size < 0.9995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    return _minus(f"{value:,.{decimals}f}")


def fixed(value: float | None, decimals: int = 3) -> str:
    """Example: fixed(-0.0281) == "−0.028"."""
    if value is None or not math.isfinite(value):
        return number(value)
    return _minus(f"{value:,.{decimals}f}")


def signed(value: float | None, decimals: int = 2) -> str:
    """Example: signed(0.72) == "+0.72", signed(-1.234) == "−1.23", signed(0.0) == "0.00"."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = fixed(value, decimals)
    return f"+{text}" if float(f"{value:.{decimals}f}") > 0 else text


def percent(share: float | None) -> str:
    """Example: percent(0.31) == "31 %", percent(0.009) == "0.9 %"."""
    if share is None or not math.isfinite(share):
        return number(share)
    value = 100 * share
    return _minus(f"{value:,.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %")


def size(num_bytes: int | float | None) -> str:
    """Example: size(3_650_000) == "3.65 MB"."""
    if num_bytes is None:
        return MISSING
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{number(value)} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """Example: duration(69) == "1 m 09 s", duration(0.7) == "0.7 s", duration(0.0083) == "8.30 ms"."""
    if seconds is None:
        return MISSING
    if 0 < seconds < 0.095:
        return f"{number(1000 * seconds)} ms"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age_text(at: datetime, now: datetime) -> str:
    """Example: "3 s ago"; "just now" under a second, so a clock that runs ahead shows nothing odd."""
    seconds = (now - at).total_seconds()
    if seconds < 1:
        return "just now"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h"), (math.inf, 86400, "d")):
        if seconds < limit:
            return f"{int(seconds // unit)} {name} ago"
    raise AssertionError("unreachable")


def age(at: datetime | None) -> Markup | str:
    """A <time> that a script keeps fresh; the exact time is its title."""
    if at is None:
        return MISSING
    exact = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{} UTC" data-age>{}</time>').format(
        exact.isoformat(timespec="milliseconds"),
        exact.strftime("%Y-%m-%d %H:%M:%S"),
        age_text(exact, datetime.now(UTC)),
    )


def middle(text: str, limit: int = 44) -> Markup:
    """A long name cut in its middle, the whole as title."""
    if len(text) <= limit:
        return escape(text)
    head = (limit - 1) * 2 // 3
    return Markup('<span title="{}">{}…{}</span>').format(text, text[:head].rstrip(), text[head + 1 - limit :].lstrip())


def short_hash(text: str | None) -> str:
    return text[:10] if text else MISSING


def spark_path(values: Sequence[float | None], width: int = 74, height: int = 22, margin: int = 2) -> str:
    """SVG path through the finite values, scaled to the box; a missing one breaks the line. Empty below two."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    step = (width - 2 * margin) / (len(values) - 1)
    parts, drawing = [], False
    for index, value in enumerate(values):
        if value is None or not math.isfinite(value):
            drawing = False
            continue
        share = (value - low) / span if span else 0.5
        y = height - margin - share * (height - 2 * margin)
        parts.append(f"{'L' if drawing else 'M'}{margin + index * step:.1f} {y:.1f}")
        drawing = True
    return "".join(parts)


def _minus(text: str) -> str:
    if text.startswith("-") and not text.strip("-0.,% "):
        return text[1:]  # a rounded-away negative is plain zero
    return text.replace("-", MINUS, 1) if text.startswith("-") else text
