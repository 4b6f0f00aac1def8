"""The statements that change the database, each within a transaction that the caller holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from transom_sql.records import Event, Incident, Intent, Job, NodeRecord
from transom_sql.store import Conflict, StoreError
from transom_sql.tables import DROPPED, PENDING, TABLES, events, incidents, intents, jobs

Linked = TypeVar("Linked", Intent, NodeRecord)


def insert_one(connection: Connection, record: Job | Incident) -> int:
    """Insert a record and return the id that the database gave it."""
    result = connection.execute(insert(TABLES[type(record)]).values(_row(record)))
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def replace_job(connection: Connection, job: Job) -> Job:
    """Replace a job that still has the version that was read; raises Conflict."""
    stored = replace(job, version=job.version + 1)
    mine = (jobs.c.id == job.id) & (jobs.c.version == job.version)
    if connection.execute(update(jobs).where(mine).values(_row(stored))).rowcount != 1:
        raise Conflict(
            f"commit job {job.id}: it is no longer at version {job.version}", hint="read the job again and decide again"
        )
    return stored


def put_incident(connection: Connection, incident: Incident) -> int:
    """Insert an incident whose id is 0, replace another; return its id."""
    if incident.id == 0:
        return insert_one(connection, incident)
    changed = update(incidents).where(incidents.c.id == incident.id).values(_row(incident))
    if connection.execute(changed).rowcount != 1:
        raise StoreError(f"replace incident {incident.id}: there is none with this id")
    return incident.id


def put(connection: Connection, record: type, records: Sequence[Any]) -> None:
    """Insert records, or replace those that have the same primary key."""
    if records:
        statement = _insert_or_replace(connection.dialect.name, TABLES[record])
        connection.execute(statement, [_row(item) for item in records])


def add_intents(connection: Connection, records: Sequence[Intent]) -> None:
    """Insert intents; one whose key exists is left as it is stored."""
    if records:
        connection.execute(_insert_new(connection.dialect.name, intents), [_row(item) for item in records])


def drop_intents(connection: Connection, keys: Sequence[str]) -> None:
    """Mark those intents that are pending as dropped."""
    if keys:
        mine = intents.c.key.in_(keys) & (intents.c.state == PENDING)
        connection.execute(update(intents).where(mine).values(state=DROPPED))


def change_intent(connection: Connection, key: str, **values: Any) -> None:
    """Change an intent that has not ended; one that was dropped while it was carried out counts as such."""
    mine = (intents.c.key == key) & intents.c.state.in_((PENDING, DROPPED))
    if connection.execute(update(intents).where(mine).values(values)).rowcount != 1:
        raise StoreError(f"change intent {key}: there is none with this key that has not ended")


def append_events(connection: Connection, records: Sequence[Event]) -> None:
    """Append events in their order."""
    if records:
        connection.execute(insert(events), [_row(item) for item in records])


def linked(records: Iterable[Linked], incident_id: int | None) -> list[Linked]:
    """Give the incident's id to the records that have none."""
    return [replace(record, incident_id=incident_id) if record.incident_id is None else record for record in records]


def _row(record: Any) -> dict[str, Any]:
    """A record's columns; not its id, which the database gives."""
    return {name: getattr(record, name) for name in _names(TABLES[type(record)])}


@cache
def _names(table: Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.columns if column.name != "id")


@cache
def _insert_or_replace(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    statement, key = _on_conflict(dialect, table), table.primary_key.columns.keys()
    changed = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=changed)


@cache
def _insert_new(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    return _on_conflict(dialect, table).on_conflict_do_nothing(index_elements=["key"])


def _on_conflict(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """The insert that knows ON CONFLICT: the same SQL, which SQLAlchemy spells once for each database."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
