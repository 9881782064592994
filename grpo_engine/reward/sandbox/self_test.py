"""Which tier this host can have: found out by really attacking it, with decoys that are worth reaching."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.errors import RewardError
from grpo_engine.reward.sandbox.attack import REACHED, Attack
from grpo_engine.reward.sandbox.attacks import ATTACKS, ESSENTIAL
from grpo_engine.reward.sandbox.forgeries import FORGERIES, Forgery, checks_of
from grpo_engine.reward.sandbox.jobs import CheckJob, Outcome, ProgramJob, TierReport
from grpo_engine.reward.sandbox.pool import SandboxPool
from grpo_engine.reward.sandbox.tiers import TIERS, Tier, bubblewrap_version, landlock_abi, obstacle

ATTACK_LIMIT_S = 3.0
"""Wall-clock seconds of an attack."""
HANG_LIMIT_S = 0.5
"""Of one that does nothing but last."""


class SandboxRefused(RewardError):
    """No tier of this host holds, and `unsafe` was not asked for."""


def choose_tier(config: SandboxConfig, whole: bool = False) -> TierReport:
    """Try the tiers that the config allows, strongest first. `whole`: the whole attack list, else the essential part.

    `unsafe` is taken at its word and not tried.
    """
    details = {"landlock_abi": str(landlock_abi()), "bubblewrap_version": bubblewrap_version() or "not installed"}
    if config.tier == "unsafe":
        return TierReport("unsafe", details)
    for tier in TIERS if config.tier == "auto" else (config.tier,):
        details[tier] = obstacle(tier) or check_tier(tier, config.num_slots, whole) or "passed"
        if details[tier] == "passed":
            return TierReport(tier, details)
    return TierReport("refused", details)


def open_pool(config: SandboxConfig) -> SandboxPool:
    """A pool in the strongest tier that holds. Raises SandboxRefused."""
    report = choose_tier(config)
    if report.tier == "refused":
        tried = "; ".join(f"{tier}: {report.details[tier]}" for tier in TIERS if tier in report.details)
        raise SandboxRefused(
            f"sandbox.tier = {config.tier}: this host cannot confine programs ({tried}); install bubblewrap, or use a "
            "kernel with Landlock (6.7 or later), or set sandbox.tier: unsafe where no hostile program can come"
        )
    return SandboxPool(config, report.tier)


def check_tier(tier: Tier, num_slots: int | None, whole: bool) -> str:
    """Empty when the tier holds; else what let it down, in words."""
    config = SandboxConfig(num_slots=num_slots, cpu_limit_s=2, memory_mib=256, file_mib=4, max_processes=16)
    attacks = ATTACKS if whole else ESSENTIAL
    forgeries = FORGERIES if whole else FORGERIES[:4]
    with decoys(config) as names, SandboxPool(config, tier) as pool:
        outcomes = pool.run_all([ProgramJob("print(1 + 1)"), *attack_jobs(attacks, names), *forgery_jobs(forgeries)])
        honest, tried, forged = outcomes[0], outcomes[1 : 1 + len(attacks)], outcomes[1 + len(attacks) :]
    if not honest.complete or honest.runs[0].stdout != "2\n":
        return f"an honest program did not run: {honest.end} {honest.error}"
    failures = [name for attack, outcome in zip(attacks, tried, strict=True) if (name := fault(attack, outcome))]
    failures += [forgery.name for forgery, outcome in zip(forgeries, forged, strict=True) if passes(outcome)]
    return ", ".join(failures)


def attack_jobs(attacks: Sequence[Attack], names: dict[str, object]) -> list[ProgramJob]:
    return [
        ProgramJob(attack.program(names), time_limit_s=HANG_LIMIT_S if attack.ends == ("time",) else ATTACK_LIMIT_S)
        for attack in attacks
    ]


def forgery_jobs(forgeries: Sequence[Forgery]) -> list[CheckJob]:
    return [CheckJob(one.program, checks_of(secrets.token_hex(8)), ATTACK_LIMIT_S) for one in forgeries]


def fault(attack: Attack, outcome: Outcome) -> str:
    """What is wrong when this came of the attack; empty when nothing is."""
    if outcome.end == "refused":
        return f"{attack.name} (not run: {outcome.error})"
    if any(REACHED in run.stdout for run in outcome.runs):
        return attack.name
    if attack.ends and outcome.end not in attack.ends:
        return f"{attack.name} (ended by {outcome.end}: {outcome.error})"
    return ""


def passes(outcome: Outcome) -> bool:
    """Whether a scorer would call this right."""
    return outcome.complete and bool(outcome.reports) and all(passed for passed, _ in outcome.reports)


@contextlib.contextmanager
def decoys(config: SandboxConfig) -> Iterator[dict[str, object]]:
    """Things that a confined program must not reach, under the names that the attacks use."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-decoy-")))
        folder.chmod(0o777)
        secret = folder / "secret.txt"
        secret.write_text("a secret")
        secret.chmod(0o666)
        abstract = f"cohort-decoy-{secrets.token_hex(8)}"
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for kind, address in (
            (socket.SOCK_STREAM, str(folder / "broker.sock")),
            (socket.SOCK_DGRAM, str(folder / "datagram.sock")),
            (socket.SOCK_STREAM, f"\0{abstract}"),
        ):
            bound = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            bound.bind(address)
            if kind == socket.SOCK_STREAM:
                bound.listen(64)
        for path in folder.glob("*.sock"):
            path.chmod(0o777)
        os.environ["COHORT_DECOY"] = "a secret"
        stack.callback(os.environ.pop, "COHORT_DECOY", None)
        decoy = stack.enter_context(subprocess.Popen(["sleep", "3600"], start_new_session=True))
        stack.callback(decoy.kill)
        yield {
            "PORT": listener.getsockname()[1],
            "SOCKET": str(folder / "broker.sock"),
            "DATAGRAM": str(folder / "datagram.sock"),
            "ABSTRACT": abstract,
            "SECRET": str(secret),
            "OUTSIDE": str(folder / "written"),
            "OWN_CODE": __file__,
            "PACKAGES": str(Path(os.__file__).parent / "site-packages"),
            "PARENT": os.getpid(),
            "DECOY": decoy.pid,
            "MAX_PROCESSES": config.max_processes,
            "MEMORY_MIB": config.memory_mib,
            "FILE_MIB": config.file_mib,
        }
