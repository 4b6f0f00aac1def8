"""The first tables.

Events are append-only: the database itself refuses to change or delete one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0001_pre"
down_revision = None

# SQLite numbers rows by itself only where the type is spelled INTEGER.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_SQLITE_APPEND_ONLY = (
    """
    CREATE TRIGGER events_no_update BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END
    """,
    """
    CREATE TRIGGER events_no_delete BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END
    """,
    # INSERT OR REPLACE deletes without firing the trigger above.
    """
    CREATE TRIGGER events_no_replace BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END
    """,
)

_POSTGRES_APPEND_ONLY = (
    """
    CREATE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'events are append-only'; END $$
    """,
    """
    CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events
    FOR EACH STATEMENT EXECUTE FUNCTION events_append_only()
    """,
)


def upgrade() -> None:
    """Make every table, then the guard of the events."""
    _jobs()
    _attempts()
    _launches()
    _incidents()
    _intents()
    _events()
    _nodes()
    _checkpoints()
    statements = {"sqlite": _SQLITE_APPEND_ONLY, "postgresql": _POSTGRES_APPEND_ONLY}
    for statement in statements[op.get_context().dialect.name]:
        op.execute(statement)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", _ID, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("uid", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("run_dir", sa.Text(), nullable=False),
        sa.Column("cwd", sa.Text(), nullable=False),
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("cancel_requested_by", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.CheckConstraint("attempt >= 0", name=op.f("ck_jobs_attempt")),
        sa.CheckConstraint("epoch >= 0", name=op.f("ck_jobs_epoch")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_jobs_version")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_jobs_state_id"), "jobs", ["state", "id"], unique=False)
    op.create_index(op.f("ix_jobs_user_id"), "jobs", ["user", "id"], unique=False)


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", _ID, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("slurm_job_id", sa.BigInteger(), nullable=True),
        sa.Column("slurm_submit_time", sa.Double(), nullable=True),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("excluded", sa.JSON(), nullable=False),
        sa.Column("barred", sa.JSON(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.CheckConstraint("generation >= 0", name=op.f("ck_attempts_generation")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_attempts")),
        sa.UniqueConstraint(
            "slurm_job_id", "slurm_submit_time", name=op.f("uq_attempts_slurm_job_id_slurm_submit_time")
        ),
        sa.UniqueConstraint("tag", name=op.f("uq_attempts_tag")),
    )


def _launches() -> None:
    op.create_table(
        "launches",
        sa.Column("job_id", _ID, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("resume_step", sa.BigInteger(), nullable=True),
        sa.Column("first_step_at", sa.Double(), nullable=True),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"], ["attempts.job_id", "attempts.number"], name=op.f("fk_launches_job_id_attempt")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_launches_job_id")),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_launches")),
    )


def _incidents() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", _ID, nullable=False),
        sa.Column("job_id", _ID, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("detected_at", sa.Double(), nullable=False),
        sa.Column("failure_class", sa.Text(), nullable=False),
        sa.Column("blame", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("confidence", sa.Text(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("diagnosed_at", sa.Double(), nullable=True),
        sa.Column("fenced_at", sa.Double(), nullable=True),
        sa.Column("drained_at", sa.Double(), nullable=True),
        sa.Column("acted_at", sa.Double(), nullable=True),
        sa.Column("recovered_at", sa.Double(), nullable=True),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_incidents_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_incidents_job_id_id"), "incidents", ["job_id", "id"], unique=False)


def _intents() -> None:
    op.create_table(
        "intents",
        sa.Column("id", _ID, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("job_id", _ID, nullable=True),
        sa.Column("incident_id", _ID, nullable=True),
        sa.Column("args", sa.JSON(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.JSON(), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'done', 'failed', 'dropped')", name=op.f("ck_intents_state")),
        sa.CheckConstraint("tries >= 0", name=op.f("ck_intents_tries")),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], name=op.f("fk_intents_incident_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_intents_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_intents")),
        sa.UniqueConstraint("key", name=op.f("uq_intents_key")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_intents_job_id_id"), "intents", ["job_id", "id"], unique=False)
    op.create_index(op.f("ix_intents_state_id"), "intents", ["state", "id"], unique=False)


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _ID, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("job_id", _ID, nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_events_job_id_id"), "events", ["job_id", "id"], unique=False)
    op.create_index(op.f("ix_events_node_id"), "events", ["node", "id"], unique=False)


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("drain_reason", sa.Text(), nullable=False),
        sa.Column("drain_user", sa.Text(), nullable=False),
        sa.Column("drain_time", sa.Double(), nullable=True),
        sa.Column("incident_id", _ID, nullable=True),
        sa.Column("checked_at", sa.Double(), nullable=True),
        sa.Column("checks", sa.JSON(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], name=op.f("fk_nodes_incident_id")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_nodes")),
    )


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job_id", _ID, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.CheckConstraint("step >= 0", name=op.f("ck_checkpoints_step")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id")),
        sa.PrimaryKeyConstraint("job_id", "step", "epoch", name=op.f("pk_checkpoints")),
    )
