"""Logging of the daemon: one line a record, time first, to standard error, where systemd or a shell picks it up."""

from __future__ import annotations

import logging
import sys


def set_up(level: str = "INFO") -> None:
    """Send every record of ``level`` and above to standard error; libraries only from WARNING on."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    logging.getLogger("transom").setLevel(level)
    logging.getLogger("asyncssh").setLevel(logging.ERROR)
