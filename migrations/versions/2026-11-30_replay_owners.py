"""which web process works on a replay

Revision: 0005
After: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replays", sa.Column("boot_id", sa.String(length=40), nullable=True))
    op.add_column("replays", sa.Column("pid", sa.Integer(), nullable=True))
    op.add_column("replays", sa.Column("process_started", sa.BigInteger(), nullable=True))
    op.add_column("replays", sa.Column("beats", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    for column in ("beats", "process_started", "pid", "boot_id"):
        op.drop_column("replays", column)
