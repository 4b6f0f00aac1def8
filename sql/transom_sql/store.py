"""The seam to the database.

A change of a job, its events and its intents are one transaction, guarded by the job's version. Everything is
synchronous: the daemon calls it from one worker thread. Every method raises StoreError when the database refuses or
fails, and then has changed nothing; its kind Unsure alone leaves that open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord, Switch


class StoreError(Exception):
    """The database refused or failed. ``hint`` is the next command to type."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Conflict(StoreError):
    """The job changed since it was read: read it again and decide again."""


class Unsure(StoreError):
    """The connection was lost in the middle of a commit, and the database did not say in time whether it arrived.

    The only error after which a change may be stored: read again what was to be changed.
    """


class DatabaseTooNew(StoreError):
    """The database was written by a newer transom; nothing was touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest records of one job, and how many launches it had: enough for a line in a list."""

    attempt: Attempt | None = None
    launch: Launch | None = None
    incident: Incident | None = None
    launches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Everything that one decision writes, all or nothing.

    ``job.version`` is the version that was read; the stored one becomes ``version + 1``. Records with a natural key
    (attempt: job and number; launch: job and epoch; node, switch: name; checkpoint: job, step and epoch) are inserted
    or replaced as a whole; an incident with id 0 is inserted, else replaced.
    An intent whose key exists already is left as it is. Events are appended.
    ``drop_intents`` are keys: those that are pending become ``dropped``, others stay as they are.
    Intents and nodes whose ``incident_id`` is None get the id of ``incident`` when there is one.
    """

    job: Job | None = None
    attempts: Sequence[Attempt] = ()
    launches: Sequence[Launch] = ()
    incident: Incident | None = None
    nodes: Sequence[NodeRecord] = ()
    switches: Sequence[Switch] = ()
    checkpoints: Sequence[Checkpoint] = ()
    intents: Sequence[Intent] = ()
    drop_intents: Sequence[str] = ()
    events: Sequence[Event] = ()


class Store(Protocol):
    """State that outlives the daemon."""

    def add_job(self, job: Job, events: Sequence[Event] = (), intents: Sequence[Intent] = ()) -> Job:
        """Store a new job and return it with its id and version 1; events and intents get its id."""
        ...

    def commit(self, change: Change) -> Job | None:
        """Apply a change; return the job as stored (None where there is none). Raises Conflict (nothing was done)."""
        ...

    def finish_intent(
        self,
        key: str,
        state: str,
        outcome: Mapping[str, Any],
        at: float,
        events: Sequence[Event] = (),
        nodes: Sequence[NodeRecord] = (),
    ) -> None:
        """Record how an intent ended (``done``, ``failed``), with what it learned, in one transaction.

        An intent that was dropped while it was carried out is finished all the same: what was done is the truth.
        Raises StoreError for a key that does not exist or has ended already.
        """
        ...

    def retry_intent(self, key: str, not_before: float, outcome: Mapping[str, Any]) -> None:
        """Leave an intent pending, to be tried again not before a time; counts the try. A dropped one stays dropped.

        Raises StoreError for a key that does not exist or has ended already.
        """
        ...

    def job(self, job_id: int) -> Job | None:
        """One job."""
        ...

    def jobs(
        self, *, states: Collection[str] | None = None, user: str | None = None, limit: int | None = 1000
    ) -> Sequence[Job]:
        """Jobs, newest first; all of them when ``limit`` is None."""
        ...

    def attempts(self, job_id: int) -> Sequence[Attempt]:
        """By number."""
        ...

    def launches(self, job_id: int) -> Sequence[Launch]:
        """By epoch."""
        ...

    def latest(self, job_ids: Collection[int]) -> Mapping[int, Latest]:
        """The newest records of each of these jobs, in few queries however many they are."""
        ...

    def incidents(self, job_id: int | None = None, *, limit: int | None = 1000) -> Sequence[Incident]:
        """By id, the *last* ``limit`` of them; all when it is None."""
        ...

    def incident(self, incident_id: int) -> Incident | None:
        """One incident."""
        ...

    def intents(
        self,
        *,
        job_id: int | None = None,
        states: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
    ) -> Sequence[Intent]:
        """By id."""
        ...

    def intent(self, key: str) -> Intent | None:
        """One intent by its key."""
        ...

    def events(
        self, *, job_id: int | None = None, node: str | None = None, after: int = 0, limit: int | None = 1000
    ) -> Sequence[Event]:
        """By id, the first ``limit`` with an id greater than ``after``; the *last* ``limit`` when ``after`` is 0."""
        ...

    def add_events(self, events: Sequence[Event]) -> None:
        """Append events that belong to no change."""
        ...

    def node(self, name: str) -> NodeRecord | None:
        """One node."""
        ...

    def nodes(self) -> Sequence[NodeRecord]:
        """All nodes with a record, by name."""
        ...

    def switches(self) -> Sequence[Switch]:
        """All switches that were ever set, by name."""
        ...

    def checkpoints(self, job_id: int) -> Sequence[Checkpoint]:
        """By step, then epoch."""
        ...

    def close(self) -> None:
        """Release the database."""
        ...
