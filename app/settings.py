"""Settings of web application, worker and launcher, from environment variables named COHORT_<FIELD>."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="COHORT_", frozen=True, use_attribute_docstrings=True)

    home: Path = Path("./var")
    """Where runs, database, broker and logs live."""
    database_url: str = ""
    """SQLAlchemy URL; empty = SQLite at <home>/cohort.db. PostgreSQL: postgresql+psycopg://user@host/name."""
    redis_url: str = ""
    """Broker for several hosts, such as redis://host:6379/0; empty = an embedded Valkey in <home>/valkey."""
    artifact_url: str = ""
    """fsspec URL of the artifact store; empty = the home itself."""

    host: str = "127.0.0.1"
    """Address the web application binds to; anything but loopback needs a user with a password."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the web application."""
    secret_key: SecretStr = SecretStr("")
    """Signs cookies and login links; empty = a random key kept in <home>/secret_key."""
    session_hours: float = Field(24 * 14, gt=0)
    """Lifetime of a login."""

    worker_name: str = ""
    """Name of this worker; empty = host name and device."""
    worker_labels: str = ""
    """Comma-separated labels of this worker."""
    worker_devices: str = ""
    """Comma-separated devices it offers, such as cpu:0 or cuda:0,cuda:1; empty = all GPUs, else cpu:0."""
    sandbox_check: bool = True
    """Whether a worker attacks its own sandbox when it starts, to tell on the workers page how it can confine programs.
    What a run's programs are confined by is found out by its engine in any case."""

    engine_command: list[str] = Field(default_factory=list)
    """Command of one rank as a JSON list; empty = this Python with `-m grpo_engine rank`. Tests put a stand-in here."""

    beat_s: float = Field(10, gt=0)
    """Seconds between beats of workers and attempts."""
    deadline_s: float = Field(40, gt=0)
    """The engine stops stepping this long after the last accepted beat was sent."""
    loss_s: float = Field(60, gt=0)
    """An attempt whose beats stand still this long on the reaper's clock is lost."""
    reap_s: float = Field(5, gt=0)
    """Seconds between rounds of the reaper."""
    stop_grace_s: float = Field(12, gt=0)
    """Seconds between SIGTERM and SIGKILL; the engine ends its step and writes its checkpoint in between. A paused
    run frees its device within this; raise it where a step and a checkpoint take longer."""
    ship_s: float = Field(0.5, gt=0)
    """Seconds between rounds of the shipper."""
    preflight_limit_s: float = Field(60, gt=0)
    """Wall-clock limit of a config check."""
    replay_limit_s: float = Field(600, gt=0)
    """Wall-clock limit of a replay of stored rollouts by other rewards."""

    @model_validator(mode="after")
    def _deadline_before_loss(self) -> Self:
        if self.deadline_s + self.beat_s >= self.loss_s:
            raise ValueError(
                f"COHORT_DEADLINE_S + COHORT_BEAT_S = {self.deadline_s + self.beat_s:g} must be below "
                f"COHORT_LOSS_S = {self.loss_s:g}, or a frozen worker could train beside its successor"
            )
        return self

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home.resolve() / 'cohort.db'}"

    def attempt_folder(self, run_id: object, number: int) -> Path:
        return self.home.resolve() / self.attempt_key(run_id, number)

    @staticmethod
    def attempt_key(run_id: object, number: int) -> str:
        """Artifact key of an attempt's directory, relative to the home."""
        return f"runs/{run_id}/attempts/{number}"


@lru_cache
def get_settings() -> Settings:
    return Settings()
