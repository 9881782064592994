"""Find the program in a completion: its text, ready to run, and where it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from grpo_engine.reward.extraction import CLOSE_TAG, OPEN_TAG

ProgramMethod = Literal["code_block", "after_think", "whole"]

MAX_PROGRAM_CHARACTERS = 262_144
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})(.*)$", re.MULTILINE)
_PYTHON = {"python", "py", "python3", "py3"}


@dataclass(frozen=True, slots=True)
class FoundProgram:
    """The program of a completion; when there is none `text` and `span` are None and `reason` says why."""

    text: str | None
    """Indentation kept; the indentation of a fence that stands in a list is taken off every line."""
    span: tuple[int, int] | None
    """Character range of the completion that it was taken from, without the fences."""
    reason: str = ""
    """Start of a sentence for the page."""


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    start: int
    end: int
    indent: int


def find_program(method: ProgramMethod, text: str, *, thinking_opened: bool = False, defines: str = "") -> FoundProgram:
    """The program inside `text`, in time linear in its length.

    code_block   the last fenced block after the thinking: a block marked as Python goes before one without mark, and
                 that before any other language; where `defines` names a function, the last block that defines it.
                 A fence that is never closed runs to the end. Without a block, as after_think.
    after_think  what follows the last </think>; everything when there is no think tag; nothing when the thinking
                 (opened by the completion, or by the prompt: `thinking_opened`) was never closed.
    whole        the completion.
    """
    start = 0
    if method != "whole":
        close = text.rfind(CLOSE_TAG)
        if close < 0 and (thinking_opened or OPEN_TAG in text):
            return FoundProgram(None, None, "The thinking was never closed with </think>")
        start = 0 if close < 0 else close + len(CLOSE_TAG)
    if method == "code_block" and (blocks := _blocks(text, start)):
        chosen = _choose(blocks, text, defines)
        return _checked(_dedented(text[chosen.start : chosen.end], chosen.indent), (chosen.start, chosen.end))
    return _checked(text[start:], (start, len(text)))


def defines_name(program: str, name: str) -> bool:
    """Whether the text seems to define the global `name`, told by its lines without parsing it."""
    name = re.escape(name)
    definition = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    return re.search(definition, program, re.MULTILINE) is not None


def _blocks(text: str, start: int) -> list[_Block]:
    """The fenced blocks with something in them; a fence is closed by as many of its characters, or more."""
    blocks: list[_Block] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text[start:]):
        mark, info = fence[2], fence[3].strip()
        if mark[0] == "`" and "`" in info:
            continue
        if opened is None:
            opened = fence
        elif mark.startswith(opened[2]) and not info:
            blocks.append(_block(opened, start, start + fence.start()))
            opened = None
    if opened is not None:
        blocks.append(_block(opened, start, len(text)))
    return [block for block in blocks if text[block.start : block.end].strip()]


def _block(opened: re.Match[str], start: int, end: int) -> _Block:
    return _Block(_language(opened[3].strip()), min(start + opened.end() + 1, end), end, len(opened[1]))


def _language(info: str) -> str:
    """Example: "Python title=a.py", "{.python}" and "python:a.py" are all "python"."""
    words = re.split(r"[\s:,}]", info.lstrip("{.").strip(), maxsplit=1)
    return words[0].lower()


def _choose(blocks: list[_Block], text: str, defines: str) -> _Block:
    ranks = [0 if block.language in _PYTHON else 1 if not block.language else 2 for block in blocks]
    best = min(ranks)
    fitting = [block for block, rank in zip(blocks, ranks, strict=True) if rank == best]
    if defines:
        defining = [b for b in fitting if defines_name(_dedented(text[b.start : b.end], b.indent), defines)]
        fitting = defining or fitting
    return fitting[-1]


def _dedented(block: str, indent: int) -> str:
    if not indent:
        return block
    lines = block.split("\n")
    return "\n".join(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines)


def _checked(program: str, span: tuple[int, int]) -> FoundProgram:
    if not program.strip():
        return FoundProgram(None, None, "The completion has no program")
    if len(program) > MAX_PROGRAM_CHARACTERS:
        return FoundProgram(None, None, f"The program is longer than {MAX_PROGRAM_CHARACTERS:,} characters")
    return FoundProgram(program, span)
