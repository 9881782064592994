"""All tables, imported here so that migrations see them."""

from app.models.base import Base, utc_now
from app.models.configs import NamedConfig, Replay, RewardSource
from app.models.people import PERMISSIONS, ApiToken, IdempotencyKey, LoginLink, User
from app.models.records import (
    Checkpoint,
    EvaluationResult,
    FindingRow,
    JournalEvent,
    Point,
    RolloutBatch,
    SelfTestRow,
    Series,
)
from app.models.runs import Attempt, Run, Transition
from app.models.workers import Worker

__all__ = [
    "PERMISSIONS",
    "ApiToken",
    "Attempt",
    "Base",
    "Checkpoint",
    "EvaluationResult",
    "FindingRow",
    "IdempotencyKey",
    "JournalEvent",
    "LoginLink",
    "NamedConfig",
    "Point",
    "Replay",
    "RewardSource",
    "RolloutBatch",
    "Run",
    "SelfTestRow",
    "Series",
    "Transition",
    "User",
    "Worker",
    "utc_now",
]
