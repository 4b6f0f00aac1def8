"""Switches: what a person, or a guard, has stopped. The program before this one does not look at them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0002_pre"
down_revision = "r0001_pre"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "switches",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("since", sa.Double(), nullable=True),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_switches")),
    )
