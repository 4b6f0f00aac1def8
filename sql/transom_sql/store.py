"""The seam to the database.

A change of a job, its events and its intents are one transaction, guarded by the job's version. Everything is
synchronous: the daemon calls it from one worker thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord


class StoreError(Exception):
    """The database refused or failed. ``hint`` is the next command to type."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Conflict(StoreError):
    """The job changed since it was read: read it again and decide again."""


class DatabaseTooNew(StoreError):
    """The database was written by a newer transom; nothing was touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Everything that one decision writes, all or nothing.

    ``job.version`` is the version that was read; the stored one becomes ``version + 1``. Records with a natural key
    (attempt, launch, node, checkpoint) are inserted or replaced; an incident with id 0 is inserted, else replaced.
    An intent whose key exists already is left as it is. Events are appended.
