"""how a worker confines programs

Revision: 0003
After: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("sandbox", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "sandbox")
