"""Says once that the database fails, once more when it fails otherwise, and once that it works again."""

from __future__ import annotations

import logging

from transom_sql.store import StoreError

log = logging.getLogger("transom.loop")

WRITES = frozenset({"commit", "add_job", "retry_intent", "_end"})
"""Calls that write: where one succeeds, the database works."""


class StoreOutage:
    """Keeps what each kind of call failed with last, so that a long outage does not fill the log."""

    def __init__(self) -> None:
        self._failing: dict[str, str] = {}

    def failed(self, call: str, error: StoreError) -> None:
        """Note that a call of this name failed."""
        cause = str(error).partition(": ")[2] or str(error)
        if cause not in self._failing.values():
            hint = f" (next: {error.hint})" if error.hint else ""
            log.error("%s%s; nothing is decided until it works, and this is not said again", error, hint)
        self._failing[call] = cause

    def worked(self, call: str) -> None:
        """Note that a call of this name succeeded."""
        if not self._failing:
            return
        self._failing.pop(call, None)
        if not self._failing or call in WRITES:
            self._failing.clear()
            log.warning("the database works again")
