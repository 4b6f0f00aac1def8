"""What a database's error means to the person who has to mend it."""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError, StatementError

from transom_sql.store import StoreError

BUSY_SECONDS = 10
"""How long a writer waits for another process before it gives up."""

# Words of sqlite.org/rescode.html, what they mean, what to type; {path} and {folder} are quoted for a shell.
_SQLITE = (
    ("disk is full", "the disk is full", "df -h {folder}"),
    ("readonly database", "the file or its folder may not be written", "ls -ld {folder} {path}"),
    ("unable to open", "it cannot be opened", "ls -ld {folder} {path}"),
    ("not a database", "this is not a SQLite database", "file {path}"),
    ("malformed", "the database is damaged", "sqlite3 {path} 'PRAGMA integrity_check'"),
    ("is locked", f"another process has been writing for {BUSY_SECONDS} s", "fuser -v {path}"),
    ("disk I/O error", "the disk fails to read or write", "df -h {folder}; dmesg | tail"),
)


def place(url: URL) -> str:
    """The database as people know it: a path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        return url.database or "memory"
    return url.render_as_string(hide_password=True)


@contextmanager
def explained(url: URL, operation: str) -> Iterator[None]:
    """Turn what a driver or SQLAlchemy raises within into a :class:`StoreError` with cause and next command."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OverflowError) as error:
        raise _explain(url, operation, error) from error


def _explain(url: URL, operation: str, error: Exception) -> StoreError:
    origin = error.orig if isinstance(error, StatementError) and error.orig else error
    cause, hint = str(origin).strip(), "journalctl -u transomd"
    if url.get_backend_name() == "sqlite" and url.database:
        path, folder = shlex.quote(url.database), shlex.quote(os.path.dirname(url.database) or ".")
        for words, meaning, command in _SQLITE:
            if words in cause:
                cause, hint = f"{meaning} ({cause})", command.format(path=path, folder=folder)
                break
    return StoreError(f"{operation} in {place(url)}: {cause}", hint=hint)
