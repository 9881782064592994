"""first tables

Revision: 0001
After: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("password_hash", sa.String(length=200), nullable=True),
        sa.Column("permissions", sa.JSON(), nullable=False),
        sa.Column("session_epoch", sa.Integer(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("boot_id", sa.String(length=40), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process_started", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("drain", sa.Boolean(), nullable=False),
        sa.Column("beats", sa.Integer(), nullable=False),
        sa.Column("last_beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_name"), "workers", ["name"], unique=False)
    op.create_index(op.f("ix_workers_state"), "workers", ["state"], unique=False)
    op.create_table(
        "api_tokens",
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=12), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_api_tokens_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_api_tokens_token_hash")),
    )
    op.create_index(op.f("ix_api_tokens_user_id"), "api_tokens", ["user_id"], unique=False)
    op.create_table(
        "configs",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Uuid(), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_configs_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_configs")),
        sa.UniqueConstraint("name", "version", name=op.f("uq_configs_name_version")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_idempotency_keys_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotency_keys")),
        sa.UniqueConstraint("user_id", "key", name=op.f("uq_idempotency_keys_user_id_key")),
    )
    op.create_table(
        "login_links",
        sa.Column("user_id", sa.Uuid(), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_login_links_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_login_links")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_login_links_secret_hash")),
    )
    op.create_table(
        "reward_sources",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Uuid(), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_reward_sources_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reward_sources")),
        sa.UniqueConstraint("name", "hash", name=op.f("uq_reward_sources_name_hash")),
    )
    op.create_index(op.f("ix_reward_sources_name"), "reward_sources", ["name"], unique=False)
    op.create_table(
        "runs",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_hash", sa.String(length=64), nullable=False),
        sa.Column("config_id", sa.Uuid(), nullable=True),
        sa.Column("reward_sources", sa.JSON(), nullable=False),
        sa.Column("git_commit", sa.String(length=40), nullable=True),
        sa.Column("owner_id", sa.Uuid(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("needs", sa.JSON(), nullable=False),
        sa.Column("max_restarts", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("parent_checkpoint_id", sa.Uuid(), nullable=True),
        sa.Column("parent_run_id", sa.Uuid(), nullable=True),
        sa.Column("imported", sa.Boolean(), nullable=False),
        sa.Column("early_stopping_override", sa.String(length=8), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("stage_steps", sa.Integer(), nullable=False),
        sa.Column("steps_done", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("last_reward", sa.Double(), nullable=True),
        sa.Column("sparkline", sa.JSON(), nullable=False),
        sa.Column("last_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["configs.id"], name=op.f("fk_runs_config_id_configs")),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_runs_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("number", name=op.f("uq_runs_number")),
    )
    op.create_index("ix_runs_queue", "runs", ["state", "priority", "queued_at"], unique=False)
    op.create_index(op.f("ix_runs_state"), "runs", ["state"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("traceback", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Uuid(), nullable=True),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("beats", sa.Integer(), nullable=False),
        sa.Column("last_beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("boot_id", sa.String(length=40), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("process_started", sa.BigInteger(), nullable=True),
        sa.Column("resumed_from_id", sa.Uuid(), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=False),
        sa.Column("repeated_steps", sa.Integer(), nullable=False),
        sa.Column("cursor_seq", sa.Integer(), nullable=False),
        sa.Column("cursor_offset", sa.BigInteger(), nullable=False),
        sa.Column("last_event_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id_runs")),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_attempts_worker_id_workers")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_attempts_run_id_number")),
    )
    op.create_index(op.f("ix_attempts_run_id"), "attempts", ["run_id"], unique=False)
    op.create_index(op.f("ix_attempts_state"), "attempts", ["state"], unique=False)
    op.create_table(
        "transitions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt_number", sa.Integer(), nullable=True),
        sa.Column("source", sa.String(length=16), nullable=True),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("actor", sa.String(length=120), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_transitions_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transitions")),
    )
    op.create_index(op.f("ix_transitions_run_id"), "transitions", ["run_id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("stage_index", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=500), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("verified_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_checkpoints_attempt_id_attempts")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("attempt_id", "stage", "step", name=op.f("uq_checkpoints_attempt_id_stage_step")),
    )
    op.create_index(op.f("ix_checkpoints_run_id"), "checkpoints", ["run_id"], unique=False)
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("benchmark", sa.String(length=200), nullable=False),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_evaluations_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("attempt_id", "seq", name=op.f("uq_evaluations_attempt_id_seq")),
    )
    op.create_table(
        "events",
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_events_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("attempt_id", "seq", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_type"), "events", ["type"], unique=False)
    op.create_table(
        "findings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("detector", sa.String(length=60), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("onset_step", sa.Integer(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("remedy", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_findings_attempt_id_attempts")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_findings_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_findings")),
        sa.UniqueConstraint("attempt_id", "seq", name=op.f("uq_findings_attempt_id_seq")),
    )
    op.create_index("ix_findings_run_id", "findings", ["run_id"], unique=False)
    op.create_table(
        "rollout_batches",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("path", sa.String(length=500), nullable=False),
        sa.Column("num_groups", sa.Integer(), nullable=False),
        sa.Column("num_completions", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_rollout_batches_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_batches")),
        sa.UniqueConstraint("attempt_id", "batch", name=op.f("uq_rollout_batches_attempt_id_batch")),
    )
    op.create_table(
        "series",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_series_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_series")),
        sa.UniqueConstraint("attempt_id", "stage", "name", name=op.f("uq_series_attempt_id_stage_name")),
    )
    op.create_table(
        "points",
        sa.Column("series_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("kind", sa.String(length=4), nullable=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name=op.f("fk_points_series_id_series")),
        sa.PrimaryKeyConstraint("series_id", "step", name=op.f("pk_points")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("points")
    op.drop_table("series")
    op.drop_table("rollout_batches")
    op.drop_index("ix_findings_run_id", table_name="findings")
    op.drop_table("findings")
    op.drop_index(op.f("ix_events_type"), table_name="events")
    op.drop_table("events")
    op.drop_table("evaluations")
    op.drop_index(op.f("ix_checkpoints_run_id"), table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_index(op.f("ix_transitions_run_id"), table_name="transitions")
    op.drop_table("transitions")
    op.drop_index(op.f("ix_attempts_state"), table_name="attempts")
    op.drop_index(op.f("ix_attempts_run_id"), table_name="attempts")
    op.drop_table("attempts")
    op.drop_index(op.f("ix_runs_state"), table_name="runs")
    op.drop_index("ix_runs_queue", table_name="runs")
    op.drop_table("runs")
    op.drop_index(op.f("ix_reward_sources_name"), table_name="reward_sources")
    op.drop_table("reward_sources")
    op.drop_table("login_links")
    op.drop_table("idempotency_keys")
    op.drop_table("configs")
    op.drop_index(op.f("ix_api_tokens_user_id"), table_name="api_tokens")
    op.drop_table("api_tokens")
    op.drop_index(op.f("ix_workers_state"), table_name="workers")
    op.drop_index(op.f("ix_workers_name"), table_name="workers")
    op.drop_table("workers")
    op.drop_table("users")
