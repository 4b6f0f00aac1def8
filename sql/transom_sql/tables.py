"""The tables. Every record of :mod:`transom_sql.records` has one, with a column for each of its fields.

The migrations make the same tables; a test compares the two. A column is added here and in a new migration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord, Switch

PENDING, DONE, FAILED, DROPPED = "pending", "done", "failed", "dropped"
"""The states of an intent, the only words that the store itself acts on."""

REVISION_TABLE = "transom_revision"
"""Where alembic keeps the schema's revision."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class Words(TypeDecorator[str]):
    """Text. NUL and lone surrogates, which Postgres and SQLite refuse, become U+FFFD: a log line may hold anything."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Make a plain ``str``, also of an enumeration's member."""
        return None if value is None else _UNSTORABLE.sub("\ufffd", str.__str__(value))


class Items(TypeDecorator[tuple[Any, ...]]):
    """A tuple of JSON values."""

    impl = JSON
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> tuple[Any, ...]:
        """Make the tuple that JSON has no word for."""
        return tuple(value)


class NotJson(TypeError):
    """A value that JSON has no form for."""


def to_json(value: Any) -> str:
    """JSON that every database takes: numbers that JSON has no word for become "NaN", "Infinity" or "-Infinity"."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=_plain, allow_nan=False)


def _plain(value: object) -> dict[Any, Any]:
    """A mapping that is no ``dict``."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotJson(f"{type(value).__name__} is not a JSON value")


def _finite(value: Any) -> Any:
    """A copy in which every number can be written as JSON."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite numbers rows by itself only where the type is spelled INTEGER; ids are never used twice (sqlite_autoincrement).
_Id = BigInteger().with_variant(Integer(), "sqlite")


def _column(name: str, kind: Any, *more: Any, null: bool = False, key: bool = False) -> Column[Any]:
    return Column(name, kind, *more, nullable=null, primary_key=key)


def _id() -> Column[Any]:
    return Column("id", _Id, primary_key=True)


def _job_id(*, null: bool = False, key: bool = False) -> Column[Any]:
    return _column("job_id", _Id, ForeignKey("jobs.id"), null=null, key=key)


jobs = Table(
    "jobs",
    metadata,
    _id(),
    _column("version", BigInteger),
    _column("name", Words),
    _column("user", Words),
    _column("uid", BigInteger),
    _column("spec", JSON),
    _column("run_dir", Words),
    _column("cwd", Words),
    _column("token_sha256", Words),
    _column("state", Words),
    _column("reason", Words),
    _column("created_at", Double),
    _column("changed_at", Double),
    _column("attempt", BigInteger),
    _column("epoch", BigInteger),
    _column("cancel_requested_by", Words),
    _column("finished_at", Double, null=True),
    _column("data", JSON),
    CheckConstraint("version >= 1", name="version"),
    CheckConstraint("attempt >= 0", name="attempt"),
    CheckConstraint("epoch >= 0", name="epoch"),
    Index(None, "state", "id"),
    Index(None, "user", "id"),
    sqlite_autoincrement=True,
)

attempts = Table(
    "attempts",
    metadata,
    _job_id(key=True),
    _column("number", BigInteger, key=True),
    _column("tag", Words),
    _column("created_at", Double),
    _column("slurm_job_id", BigInteger, null=True),
    _column("slurm_submit_time", Double, null=True),
    _column("nodes", Items),
    _column("excluded", Items),
    _column("barred", Items),
    _column("generation", BigInteger),
    _column("started_at", Double, null=True),
    _column("ended_at", Double, null=True),
    _column("end_reason", Words),
    _column("data", JSON),
    CheckConstraint("generation >= 0", name="generation"),
    UniqueConstraint("tag"),
    UniqueConstraint("slurm_job_id", "slurm_submit_time"),
)

launches = Table(
    "launches",
    metadata,
    _job_id(key=True),
    _column("epoch", BigInteger, key=True),
    _column("attempt", BigInteger),
    _column("nodes", Items),
    _column("started_at", Double),
    _column("ended_at", Double, null=True),
    _column("resume_step", BigInteger, null=True),
    _column("first_step_at", Double, null=True),
    _column("first_step", BigInteger, null=True),
    _column("last_step", BigInteger, null=True),
    _column("last_step_at", Double, null=True),
    _column("end_reason", Words),
    ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),
)

incidents = Table(
    "incidents",
    metadata,
    _id(),
    _job_id(),
    _column("attempt", BigInteger),
    _column("epoch", BigInteger),
    _column("detected_at", Double),
    _column("failure_class", Words),
    _column("blame", Words),
    _column("action", Words),
    _column("nodes", Items),
    _column("ranks", Items),
    _column("confidence", Words),
    _column("summary", Words),
    _column("evidence", Items),
    _column("diagnosed_at", Double, null=True),
    _column("fenced_at", Double, null=True),
    _column("drained_at", Double, null=True),
    _column("acted_at", Double, null=True),
    _column("recovered_at", Double, null=True),
    _column("closed_at", Double, null=True),
    _column("last_step", BigInteger, null=True),
    _column("data", JSON),
    Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)

intents = Table(
    "intents",
    metadata,
    _id(),
    _column("key", Words),
    _column("kind", Words),
    _column("state", Words),
    _column("created_at", Double),
    _job_id(null=True),
    _column("incident_id", _Id, ForeignKey("incidents.id"), null=True),
    _column("args", JSON),
    _column("tries", BigInteger),
    _column("not_before", Double),
    _column("finished_at", Double, null=True),
    _column("outcome", JSON),
    CheckConstraint("state IN ('pending', 'done', 'failed', 'dropped')", name="state"),
    CheckConstraint("tries >= 0", name="tries"),
    UniqueConstraint("key"),
    Index(None, "state", "id"),
    Index(None, "job_id", "id"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    _id(),
    _column("at", Double),
    _column("kind", Words),
    _column("message", Words),
    _job_id(null=True),
    _column("node", Words, null=True),
    _column("data", JSON),
    Index(None, "job_id", "id"),
    Index(None, "node", "id"),
    sqlite_autoincrement=True,
)

nodes = Table(
    "nodes",
    metadata,
    _column("name", Words, key=True),
    _column("changed_at", Double),
    _column("drain_reason", Words),
    _column("drain_user", Words),
    _column("drain_time", Double, null=True),
    _column("incident_id", _Id, ForeignKey("incidents.id"), null=True),
    _column("checked_at", Double, null=True),
    _column("checks", Items),
    _column("data", JSON),
)

switches = Table(
    "switches",
    metadata,
    _column("name", Words, key=True),
    _column("changed_at", Double),
    _column("since", Double, null=True),
    _column("who", Words),
    _column("reason", Words),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _job_id(key=True),
    _column("step", BigInteger, key=True),
    _column("epoch", BigInteger, key=True),
    _column("stage", Words),
    _column("at", Double),
    _column("path", Words),
    CheckConstraint("step >= 0", name="step"),
)

TABLES: Mapping[type, Table] = {
    Job: jobs,
    Attempt: attempts,
    Launch: launches,
    Incident: incidents,
    Intent: intents,
    Event: events,
    NodeRecord: nodes,
    Switch: switches,
    Checkpoint: checkpoints,
}
"""The table of each record."""
