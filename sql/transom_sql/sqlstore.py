"""The store on SQLAlchemy: SQLite or Postgres."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Select, func, select

from transom_sql import writes
from transom_sql.causes import explained
from transom_sql.connect import writer
from transom_sql.owner import Ownership
from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord, Switch
from transom_sql.store import Change, Latest, Store
from transom_sql.tables import (
    TABLES,
    attempts,
    checkpoints,
    events,
    incidents,
    intents,
    jobs,
    launches,
    nodes,
    switches,
)
from transom_sql.transaction import transaction

R = TypeVar("R")
_MANY = 500
"""Values in one IN; SQLite's bound is 32766, older ones' 999."""


def _slices(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


class SqlStore(Store):
    """The store on an engine of :func:`transom_sql.connect.connect`, which it owns.

    Any thread may call it. Every method raises StoreError when the database refuses or fails.
    """

    def __init__(self, engine: Engine, ownership: Ownership | None = None) -> None:
        self._engine = engine
        self._ownership = ownership
        self._writer = ownership.writer if ownership else writer(engine)

    def add_job(self, job: Job, events: Sequence[Event] = (), intents: Sequence[Intent] = ()) -> Job:
        """Store a new job and return it with its id and version 1; events and intents get its id."""
        with self._write(f"add job {job.name}") as connection:
            fresh = replace(job, version=1)
            stored = replace(fresh, id=writes.insert_one(connection, fresh))
            writes.add_intents(connection, [replace(intent, job_id=stored.id) for intent in intents])
            writes.append_events(connection, [replace(event, job_id=stored.id) for event in events])
        return stored

    def commit(self, change: Change) -> Job | None:
        """Apply a change and return its job as stored; raises Conflict, and then did nothing."""
        with self._write(f"commit job {change.job.id}" if change.job else "commit") as connection:
            job = writes.replace_job(connection, change.job) if change.job else None
            incident_id = writes.put_incident(connection, change.incident) if change.incident else None
            writes.put(connection, Attempt, change.attempts)
            writes.put(connection, Launch, change.launches)
            writes.put(connection, NodeRecord, writes.linked(change.nodes, incident_id))
            writes.put(connection, Switch, change.switches)
            writes.put(connection, Checkpoint, change.checkpoints)
            writes.drop_intents(connection, change.drop_intents)
            writes.add_intents(connection, writes.linked(change.intents, incident_id))
            writes.append_events(connection, change.events)
        return job

    def finish_intent(
        self,
        key: str,
        state: str,
        outcome: Mapping[str, Any],
        at: float,
        events: Sequence[Event] = (),
        nodes: Sequence[NodeRecord] = (),
    ) -> None:
        """Record how an intent ended, with what it learned, in one transaction."""
        with self._write(f"finish intent {key}") as connection:
            writes.change_intent(connection, key, state=state, outcome=outcome, finished_at=at)
            writes.put(connection, NodeRecord, nodes)
            writes.append_events(connection, events)

    def retry_intent(self, key: str, not_before: float, outcome: Mapping[str, Any]) -> None:
        """Leave an intent pending, to be tried again not before a time; counts the try."""
        with self._write(f"retry intent {key}") as connection:
            writes.change_intent(connection, key, tries=intents.c.tries + 1, not_before=not_before, outcome=outcome)

    def add_events(self, events: Sequence[Event]) -> None:
        """Append events that belong to no change."""
        with self._write("add events") as connection:
            writes.append_events(connection, events)

    def job(self, job_id: int) -> Job | None:
        """One job."""
        return self._first(Job, select(jobs).where(jobs.c.id == job_id))

    def jobs(
        self, *, states: Collection[str] | None = None, user: str | None = None, limit: int | None = 1000
    ) -> Sequence[Job]:
        """Jobs, newest first."""
        query = select(jobs).order_by(jobs.c.id.desc()).limit(limit)
        if states is not None:
            query = query.where(jobs.c.state.in_(states))
        if user is not None:
            query = query.where(jobs.c.user == user)
        return self._all(Job, query)

    def attempts(self, job_id: int) -> Sequence[Attempt]:
        """By number."""
        return self._all(Attempt, select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.number))

    def launches(self, job_id: int) -> Sequence[Launch]:
        """By epoch."""
        return self._all(Launch, select(launches).where(launches.c.job_id == job_id).order_by(launches.c.epoch))

    def latest(self, job_ids: Collection[int]) -> Mapping[int, Latest]:
        """The newest records of each of these jobs, in few queries however many they are."""
        found: dict[int, Latest] = {}
        for ids in _slices(sorted(set(job_ids)), _MANY):
            newest_attempt = self._newest(Attempt, attempts.c.number, ids)
            newest_launch = self._newest(Launch, launches.c.epoch, ids)
            newest_incident = self._newest(Incident, incidents.c.id, ids)
            counts = self._counts(ids)
            for number in ids:
                found[number] = Latest(
                    attempt=newest_attempt.get(number),
                    launch=newest_launch.get(number),
                    incident=newest_incident.get(number),
                    launches=counts.get(number, 0),
                )
        return found

    def _newest(self, record: type[R], order: ColumnElement[Any], ids: Sequence[int]) -> dict[int, R]:
        table = TABLES[record]
        newest = (
            select(table.c.job_id, func.max(order).label("top"))
            .where(table.c.job_id.in_(ids))
            .group_by(table.c.job_id)
            .subquery()
        )
        query = select(table).join(newest, (table.c.job_id == newest.c.job_id) & (order == newest.c.top))
        return {item.job_id: item for item in self._all(record, query)}  # type: ignore[attr-defined]

    def _counts(self, ids: Sequence[int]) -> dict[int, int]:
        query = select(launches.c.job_id, func.count()).where(launches.c.job_id.in_(ids)).group_by(launches.c.job_id)
        with explained(self._engine.url, "count launches"), self._engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def incidents(self, job_id: int | None = None, *, limit: int | None = 1000) -> Sequence[Incident]:
        """The last ``limit``, by id."""
        query = select(incidents).order_by(incidents.c.id.desc()).limit(limit)
        if job_id is not None:
            query = query.where(incidents.c.job_id == job_id)
        return self._all(Incident, query)[::-1]

    def incident(self, incident_id: int) -> Incident | None:
        """One incident."""
        return self._first(Incident, select(incidents).where(incidents.c.id == incident_id))

    def intents(
        self,
        *,
        job_id: int | None = None,
        states: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
    ) -> Sequence[Intent]:
        """By id."""
        query = select(intents).order_by(intents.c.id)
        if job_id is not None:
            query = query.where(intents.c.job_id == job_id)
        if states is not None:
            query = query.where(intents.c.state.in_(states))
        if kinds is not None:
            query = query.where(intents.c.kind.in_(kinds))
        return self._all(Intent, query)

    def intent(self, key: str) -> Intent | None:
        """One intent by its key."""
        return self._first(Intent, select(intents).where(intents.c.key == key))

    def events(
        self, *, job_id: int | None = None, node: str | None = None, after: int = 0, limit: int | None = 1000
    ) -> Sequence[Event]:
        """By id: the first ``limit`` after an id, or the last ``limit`` of all when ``after`` is 0."""
        query = select(events).where(events.c.id > after).limit(limit)
        if job_id is not None:
            query = query.where(events.c.job_id == job_id)
        if node is not None:
            query = query.where(events.c.node == node)
        if after:
            return self._all(Event, query.order_by(events.c.id))
        return self._all(Event, query.order_by(events.c.id.desc()))[::-1]

    def node(self, name: str) -> NodeRecord | None:
        """One node."""
        return self._first(NodeRecord, select(nodes).where(nodes.c.name == name))

    def nodes(self) -> Sequence[NodeRecord]:
        """All nodes with a record, by name."""
        return self._all(NodeRecord, select(nodes).order_by(nodes.c.name))

    def switches(self) -> Sequence[Switch]:
        """All switches that were ever set, by name."""
        return self._all(Switch, select(switches).order_by(switches.c.name))

    def checkpoints(self, job_id: int) -> Sequence[Checkpoint]:
        """By step, then epoch."""
        query = select(checkpoints).where(checkpoints.c.job_id == job_id)
        return self._all(Checkpoint, query.order_by(checkpoints.c.step, checkpoints.c.epoch))

    def close(self) -> None:
        """Release the database; the store cannot be used any more."""
        self._engine.dispose()
        if self._ownership:
            self._ownership.release()

    @contextmanager
    def _write(self, operation: str) -> Iterator[Connection]:
        with explained(self._engine.url, operation), transaction(self._writer, operation) as connection:
            yield connection

    def _all(self, record: type[R], query: Select[Any]) -> list[R]:
        with explained(self._engine.url, f"read {TABLES[record].name}"), self._engine.connect() as connection:
            return [record(**row) for row in connection.execute(query).mappings()]

    def _first(self, record: type[R], query: Select[Any]) -> R | None:
        found = self._all(record, query)
        return found[0] if found else None
