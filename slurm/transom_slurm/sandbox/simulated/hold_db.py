"""Holds the write lock of a SQLite database: ``hold_db.py PATH``. Ends by any signal; the lock goes with it."""

from __future__ import annotations

import signal
import sqlite3
import sys


def main() -> None:
    """Take the lock, say so on standard output, and keep it."""
    connection = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
