"""Registered reward source code: kept by name and content hash, compiled but never executed here."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.errors import Invalid, NotFound
from app.models import RewardSource, User
from app.security import check_permission
from grpo_engine.config import CustomReward, RLStage, RunConfig
from grpo_engine.errors import Problem

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
RESERVED = ("playground",)
"""Addresses of pages of their own below /rewards."""
MAX_SOURCE_BYTES = 1 << 20


def register(session: Session, actor: User, name: str, source: str) -> RewardSource:
    """Keep source code under name and hash; the same source twice is one row.

    Raises Forbidden without the `code` permission, Invalid when it is not Python or defines no reward function."""
    check_permission(actor, "code")
    problems = [*_name_problems(name), *source_problems(name, source)]
    if problems:
        raise Invalid.of(problems)
    digest = hashlib.sha256(source.encode()).hexdigest()
    known = session.scalar(select(RewardSource).where(RewardSource.name == name, RewardSource.hash == digest))
    if known is not None:
        return known
    row = RewardSource(name=name, hash=digest, source=source, owner_id=actor.id)
    session.add(row)
    session.flush()
    return row


def _name_problems(name: str) -> list[Problem]:
    if NAME.fullmatch(name) and name not in RESERVED:
        return []
    return [
        Problem(
            "name", name[:200], "is not a reward name", "use a-z, digits and _, starting with a letter; not playground"
        )
    ]


def source_problems(name: str, source: str) -> list[Problem]:
    """What is wrong with reward source code, as far as reading it tells. Nothing is executed."""
    if len(source.encode()) > MAX_SOURCE_BYTES:
        return [Problem("source", f"{len(source)} characters", "is too long", "keep it below 1 MiB")]
    try:
        tree = ast.parse(source, filename=f"<reward {name}>")
        compile(source, f"<reward {name}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        return [Problem("source", where[:200], "is not valid Python", "correct that line")]
    public = [
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    if not public:
        return [Problem("source", "no function", "defines no reward", "define reward(completions, **columns)")]
    return []


def list_sources(session: Session, name: str | None = None) -> list[RewardSource]:
    """All registered sources, newest first."""
    query = select(RewardSource).order_by(RewardSource.created_at.desc(), RewardSource.hash)
    return list(session.scalars(query.where(RewardSource.name == name) if name else query))


def get_source(session: Session, name: str, hash: str | None = None) -> RewardSource:
    """This version, the newest without a hash; a unique prefix of 8 or more hex digits will do. Raises NotFound."""
    rows = list_sources(session, name)
    found = [row for row in rows if hash is None or (len(hash) >= 8 and row.hash.startswith(hash))]
    if not found or (hash is not None and len(found) > 1):
        raise NotFound(f"There is no reward {name!r}" + (f" with hash {hash}." if hash and rows else "."))
    return found[0]


def custom_names(config: RunConfig) -> dict[str, str]:
    """Name of each custom reward -> its field in the config."""
    return {
        reward.name: f"stages.{i}.rewards.{j}.name"
        for i, stage in enumerate(config.stages)
        if isinstance(stage, RLStage)
        for j, reward in enumerate(stage.rewards)
        if isinstance(reward, CustomReward)
    }


def sources_for(
    session: Session, config: RunConfig, hashes: Mapping[str, str] | None = None
) -> dict[str, RewardSource]:
    """The registered source of every custom reward of a config: by hash where given, else the newest.

    Raises Invalid naming the field of each that is not registered."""
    found: dict[str, RewardSource] = {}
    problems: list[Problem] = []
    for name, field in custom_names(config).items():
        try:
            found[name] = get_source(session, name, (hashes or {}).get(name))
        except NotFound:
            remedy = "register its source first: `cohort run start --reward file.py` or POST /api/v1/rewards"
            problems.append(Problem(field, name, "is not a registered reward", remedy))
    if problems:
        raise Invalid.of(problems)
    return found
