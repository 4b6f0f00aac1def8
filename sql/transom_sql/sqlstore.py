"""The store on SQLAlchemy: SQLite now, any database with ``INSERT .. ON CONFLICT`` and migrations of ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Select, select

from transom_sql import writes
from transom_sql.causes import explained
from transom_sql.connect import writer
from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord
from transom_sql.store import Change, Store
from transom_sql.tables import TABLES, attempts, checkpoints, events, incidents, intents, jobs, launches, nodes

R = TypeVar("R")


class SqlStore(Store):
    """The store on an engine of :func:`transom_sql.connect.connect`, which it owns.

    Any thread may call it. Every method raises StoreError when the database refuses or fails.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = writer(engine)

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

    def incidents(self, job_id: int | None = None, *, limit: int | None = 1000) -> Sequence[Incident]:
        """The last ``limit``, by id."""
        query = select(incidents).order_by(incidents.c.id.desc()).limit(limit)
        if job_id is not None:
            query = query.where(incidents.c.job_id == job_id)
        return self._all(Incident, query)[::-1]

    def intents(self, *, job_id: int | None = None, states: Collection[str] | None = None) -> Sequence[Intent]:
        """By id."""
        query = select(intents).order_by(intents.c.id)
        if job_id is not None:
            query = query.where(intents.c.job_id == job_id)
        if states is not None:
            query = query.where(intents.c.state.in_(states))
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

    def checkpoints(self, job_id: int) -> Sequence[Checkpoint]:
        """By step, then epoch."""
        query = select(checkpoints).where(checkpoints.c.job_id == job_id)
        return self._all(Checkpoint, query.order_by(checkpoints.c.step, checkpoints.c.epoch))

    def close(self) -> None:
        """Release the database; the store cannot be used any more."""
        self._engine.dispose()

    @contextmanager
    def _write(self, operation: str) -> Iterator[Connection]:
        with explained(self._engine.url, operation), self._writer.begin() as connection:
            yield connection

    def _all(self, record: type[R], query: Select[Any]) -> list[R]:
        with explained(self._engine.url, f"read {TABLES[record].name}"), self._engine.connect() as connection:
            return [record(**row) for row in connection.execute(query).mappings()]

    def _first(self, record: type[R], query: Select[Any]) -> R | None:
        found = self._all(record, query)
        return found[0] if found else None
