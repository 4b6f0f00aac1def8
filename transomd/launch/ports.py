"""A port for the program's rendezvous. Standard library only."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST, LAST = 15000, 65535
TRIES = 100
_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT = (32768, 60999)


def free_port(address: str = "") -> int:
    """Return a TCP port that nobody has bound, and that the kernel gives to no connection by itself.

    Raises OSError for an address that is not this machine's.

    The program binds it a second or more later: one of the kernel's own range may be a connection's by then, of the
    program's own ranks too, and the launch fails with ``Address already in use``.
    """
    low, high = kernels_range()
    ours = [*range(FIRST, min(low, LAST + 1)), *range(max(high + 1, FIRST), LAST + 1)]
    for port in random.sample(ours, min(TRIES, len(ours))):
        with contextlib.suppress(OSError):
            return _bound(address, port)
    return _bound(address, 0)


def kernels_range() -> tuple[int, int]:
    """Return the first and the last port that Linux picks for a connection (ip(7), ``ip_local_port_range``)."""
    try:
        low, high = _KERNELS.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT


def _bound(address: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((address, port))
        found: int = sock.getsockname()[1]
        return found
