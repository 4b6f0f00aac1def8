"""What systemd is told (sd_notify(3)): ready, alive, reloading, stopping. Nothing happens where nobody listens."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from transom_sql.store import StoreError

from transomd.tol.watchers import Watcher


def notify_systemd(*states: str) -> None:
    """Send states to ``$NOTIFY_SOCKET``. One that is gone, or that nobody reads, is no reason to stop or to wait."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall("\n".join(states).encode())


def reloading() -> None:
    """Say that the settings are read again; READY=1 ends it."""
    notify_systemd("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


class Watchdog(Watcher):
    """Says that the daemon is alive, and only when a cycle has come to its end.

    A cycle that the database refused counts: the database's absence is no fault that a restart could mend. One that
    failed otherwise, or does not end, does not: then systemd starts the daemon anew, which takes up what is recorded.
    """

    def __init__(self, status: Callable[[], str]) -> None:
        self._status = status

    def cycled(self, seconds: float, error: Exception | None) -> None:
        """Report one cycle."""
        if error is None or isinstance(error, StoreError):
            notify_systemd("WATCHDOG=1", f"STATUS={self._status()}")


def watchdog_s() -> float | None:
    """Return within how many seconds systemd wants a sign of life from this process; None when it wants none."""
    pid, wanted = os.environ.get("WATCHDOG_PID"), os.environ.get("WATCHDOG_USEC", "")
    if not wanted.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(wanted) / 1e6
