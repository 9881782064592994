"""One check of the self-test: what was measured, and whether it will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_engine.errors import SelfTestFailed
from grpo_engine.protocols import Communicator


@dataclass(frozen=True, slots=True)
class Check:
    """Example: Check("on_policy_ratio", True, "ratio 1 for each of 96 tokens")."""

    name: str
    passed: bool
    detail: str
    fatal: bool = True
    """False: a failure is worth knowing but training is right all the same."""


def over_ranks(checks: list[Check], communicator: Communicator) -> list[Check]:
    """Each check as the worst rank saw it; a rank above 0 is named in the detail. Collective."""
    by_rank = communicator.gather(checks)
    worst = []
    for seen in zip(*by_rank, strict=True):
        failed = next((rank for rank, check in enumerate(seen) if not check.passed), 0)
        check = seen[failed]
        detail = f"rank {failed}: {check.detail}" if failed else check.detail
        worst.append(Check(check.name, check.passed, detail, check.fatal))
    return worst


def report(checks: list[Check], journal: Callable[[Check], None], warn: Callable[[str], None], *, stop: bool) -> None:
    """Journal every check. Raises SelfTestFailed naming the fatal ones that failed when `stop`, else warns of them."""
    for check in checks:
        journal(check)
    failed = [check for check in checks if not check.passed]
    fatal = [check for check in failed if check.fatal and stop]
    for check in failed:
        if check not in fatal:
            warn(f"self-test {check.name}: {check.detail}")
    if fatal:
        details = "; ".join(f"{check.name}: {check.detail}" for check in fatal)
        raise SelfTestFailed(f"the self-test found {details}. Set self_test to warn to train all the same.")
