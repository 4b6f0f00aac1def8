"""Says of a TCP address that cannot be listened on which one it is, and where it is set."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from transomd.errors import TransomError


@contextlib.contextmanager
def listening(field: str, where: tuple[str, int]) -> Iterator[None]:
    """Raise TransomError, with the site file's field and the address, instead of OSError."""
    try:
        yield
    except OSError as error:
        host, port = where
        number = error.errno or 0
        cause = os.strerror(number) if number > 0 else error.strerror or str(error)
        busy = number == errno.EADDRINUSE
        hint = f"ss -ltnp 'sport = :{port}'" if busy else f"give an address of this host as daemon.{field}: ip -br addr"
        raise TransomError(f"listening on {host or '*'}:{port} (daemon.{field}): {cause}", hint=hint) from error
