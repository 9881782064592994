"""Markdown that does not render as it was meant. Any text is valid markdown, so a parser has nothing to report: what is
looked for are the marks that a reader would then see as characters."""

from __future__ import annotations

import re

_FENCE = re.compile(r"[ \t]{0,8}(`{3,}|~{3,})([^`\n]*)$")
_HEADING = re.compile(r"[ ]{0,3}#{1,6}(?=[ \t]|$)|[ ]{0,3}#{2,6}(?=[^#\s])")
_ITEM = re.compile(r"[ \t]*(?:[-*+•]|\d{1,3}[.)])(?=[ \t])|[ \t]*[-+*](?=[A-Za-z])")
_LINK = re.compile(r"\]\(")
# Two asterisks beside a letter or a closing sign, but not between two operands (2**3).
_BOLD = re.compile(r"(?<![\w*])\*\*(?=[^\s*])|(?<=[^\s*])\*\*(?![\w*])")
_RULER = re.compile(r"[ \t]*\|?[ \t]*:?-{2,}:?[ \t]*(?:\|[ \t]*:?-{2,}:?[ \t]*)+\|?[ \t]*$")

# Longer lines are no rulers; bounds the time for lines of blanks.
_LONGEST_RULER = 500


def find_markdown_faults(text: str) -> tuple[int, list[str]]:
    """How many marked-up elements `text` has, and what is wrong with those that do not render, without full stop."""
    fenced = "```" in text or "~~~" in text
    lines, elements, faults = _outside_fences(text) if fenced else (text.split("\n"), 0, [])
    for line in lines:
        found, wrong = _check_line(line)
        elements, faults = elements + found, faults + wrong
    bold_elements, bold_faults = _check_bold(lines) if "**" in text else (0, [])
    table_elements, table_faults = _check_tables(lines) if "|" in text else (0, [])
    formulas = text.count("$$")
    if formulas % 2:
        faults.append("a formula opened by $$ is never closed")
    return elements + bold_elements + table_elements + (formulas + 1) // 2, faults + bold_faults + table_faults


def _outside_fences(text: str) -> tuple[list[str], int, list[str]]:
    """The lines outside of fenced code, the number of fences, and whether the last is open."""
    outside: list[str] = []
    fence, blocks = "", 0
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found:
                fence, blocks = found[1], blocks + 1
            else:
                outside.append(line)
        elif found and found[1].startswith(fence) and not found[2].strip():
            fence = ""
    return outside, blocks, ["a code fence is never closed"] if fence else []


def _check_line(line: str) -> tuple[int, list[str]]:
    elements = 0
    faults: list[str] = []
    first = line.lstrip(" \t")[:1]
    if first not in "#-*+•" and not first.isdecimal() and "](" not in line:
        return elements, faults
    if heading := _HEADING.match(line):
        elements += 1
        if not line[heading.end() :].strip():
            faults.append("a heading is empty")
        elif not line[heading.end()].isspace():
            faults.append("a heading has no blank after its #")
    elif item := _ITEM.match(line):
        elements += 1
        if not line[item.end() : item.end() + 1].isspace():
            faults.append("a list item has no blank after its mark")
        elif not line[item.end() :].strip():
            faults.append("a list item is empty")
    last_close = line.rfind(")")
    for link in _LINK.finditer(line):
        elements += 1
        if last_close < link.end():
            faults.append("a link is never closed")
    return elements, faults


def _check_bold(lines: list[str]) -> tuple[int, list[str]]:
    """Bold text must be closed in its paragraph."""
    elements, faults, marks = 0, [], 0
    for line in [*lines, ""]:
        if line.strip():
            marks += len(_BOLD.findall(line)) if "**" in line else 0
            continue
        elements += (marks + 1) // 2
        if marks % 2:
            faults.append("bold text is never closed")
        marks = 0
    return elements, faults


def _check_tables(lines: list[str]) -> tuple[int, list[str]]:
    """A table's ruler and rows must have as many cells as its head."""
    elements, faults, cells = 0, [], 0
    for before, line in zip(["", *lines], lines, strict=False):
        if "|" not in line:
            cells = 0
        elif len(line) <= _LONGEST_RULER and _RULER.match(line):
            elements += 1
            cells = _num_cells(before)
            if _num_cells(line) != cells:
                faults.append("a table's ruler has another number of cells than its head")
        elif cells:
            elements += 1
            if _num_cells(line) != cells:
                faults.append("a table's row has another number of cells than its head")
    return elements, faults


def _num_cells(line: str) -> int:
    return line.strip().strip("|").replace("\\|", "").count("|") + 1
