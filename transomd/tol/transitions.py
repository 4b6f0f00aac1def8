"""The lawful moves between job states: one table. docs/states.md is generated from it."""

from __future__ import annotations

from collections.abc import Mapping

from transomd.words import JobState

_ANY_END = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
_STARTED = _ANY_END | {JobState.CHECKING, JobState.RUNNING, JobState.RECOVERING}

MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.SUBMITTED: frozenset({JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.QUEUED: _STARTED | {JobState.HELD},
    JobState.CHECKING: _ANY_END | {JobState.RUNNING, JobState.RECOVERING},
    JobState.RUNNING: _ANY_END | {JobState.RECOVERING},
    JobState.RECOVERING: _ANY_END | {JobState.QUEUED, JobState.CHECKING, JobState.RUNNING},
    JobState.HELD: _STARTED | {JobState.QUEUED},
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class UnlawfulMove(Exception):
    """A decision asked for a move that the table does not hold: a fault in transom, never the user's."""


def check_move(old: JobState, new: JobState) -> None:
    """Raise UnlawfulMove unless ``old`` may become ``new`` (staying is always lawful)."""
    if new is not old and new not in MOVES[old]:
        raise UnlawfulMove(f"a job cannot go from {old} to {new}")
