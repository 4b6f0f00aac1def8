"""What a database's error means to the person who has to mend it."""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError, StatementError

from transom_sql.store import StoreError
from transom_sql.tables import NotJson

BUSY_SECONDS = 5
"""How long a writer waits for another process before it gives up."""

_BUSY = f"another process has been writing for {BUSY_SECONDS} s"

# Words of sqlite.org/rescode.html, what they mean, what to type; {path} and {folder} are quoted for a shell.
_SQLITE = (
    ("disk is full", "the disk is full", "df -h {folder}"),
    ("readonly database", "the file or its folder may not be written", "ls -ld {folder} {path}"),
    ("unable to open", "it cannot be opened", "ls -ld {folder} {path}"),
    ("not a database", "this is not a SQLite database", "file {path}"),
    ("malformed", "the database is damaged", "sqlite3 {path} 'PRAGMA integrity_check'"),
    ("is locked", _BUSY, "fuser -v {path}"),
    ("disk I/O error", "the disk fails to read or write", "df -h {folder}; dmesg | tail"),
)

_READY, _SQL = "pg_isready {reach}", "psql {reach} -c {sql}"

# SQLSTATE (appendix A of Postgres' manual) or words of libpq, what they mean, what to type; a class is two letters.
_POSTGRES = (
    ("53100", "the server's disk is full", "df -h, on the database server"),
    (
        "53300",
        "the server takes no more connections",
        (_SQL, "SELECT usename, count(*) FROM pg_stat_activity GROUP BY 1"),
    ),
    ("55P03", _BUSY, (_SQL, "SELECT pid, application_name, state, query FROM pg_stat_activity")),
    ("25006", "this server takes no writes (a standby?)", (_SQL, "SELECT pg_is_in_recovery()")),
    ("42501", "this user may not", (_SQL, r"\l")),
    ("28", "the server refuses this user", _READY),
    ("57P", "the server is stopping or starting", _READY),
    ("08", "the connection is lost", _READY),
    ("password authentication failed", "the server refuses this user", _READY),
    ("no password supplied", "the server wants a password, and ~/.pgpass has none for it", _READY),
    ("does not exist", "the server knows no such user or database", "psql {server} -l"),
    ("starting up", "the server is starting", _READY),
    ("shutting down", "the server is stopping", _READY),
    ("connection", "it cannot be reached", _READY),
    ("could not translate host", "its host has no address", _READY),
)


def place(url: URL) -> str:
    """The database as people know it: a path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        return url.database or "memory"
    return url.render_as_string(hide_password=True)


def reach(url: URL, *, database: bool = True) -> str:
    """The options by which Postgres' own programs reach the same database, or its server; never with a password."""
    host = url.host or url.query.get("host", "")
    user = url.username or url.query.get("user", "")
    given = {"-h": host, "-p": url.port or "", "-U": user, "-d": (database and url.database) or ""}
    return " ".join(f"{option} {shlex.quote(str(value))}" for option, value in given.items() if value)


@contextmanager
def explained(url: URL, operation: str) -> Iterator[None]:
    """Turn what a driver or SQLAlchemy raises within into a :class:`StoreError` with cause and next command."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OverflowError, NotJson) as error:
        raise _explain(url, operation, error) from error


@contextmanager
def explain_file(operation: str, file: Path) -> Iterator[None]:
    """As :func:`explained`, for work on a SQLite file without an engine; errors of the file system too."""
    try:
        yield
    except sqlite3.Error as error:
        meaning, hint = _of_sqlite(str(file), str(error)) or ("", "")
        raise StoreError(
            f"{operation}: {meaning} ({error})" if meaning else f"{operation}: {error}", hint=hint
        ) from error
    except OSError as error:
        raise StoreError(
            f"{operation}: {error.strerror}", hint=f"df -h {_quoted(file.parent)}; ls -ld {_quoted(file)}"
        ) from error


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _explain(url: URL, operation: str, error: Exception) -> StoreError:
    origin = error.orig if isinstance(error, StatementError) and error.orig else error
    cause, hint = str(origin).strip(), "journalctl -u transomd"
    if url.get_backend_name() == "sqlite":
        meant = _of_sqlite(url.database, cause) if url.database else None
    else:
        # The lines after the first quote rows, which hold users' data; only libpq's own errors go on.
        state = str(getattr(origin, "sqlstate", None) or "")
        cause = cause.partition("\n")[0] if state else " ".join(cause.split())
        meant = _of_postgres(url, state, cause)
    if meant:
        cause, hint = f"{meant[0]} ({cause})", meant[1]
    return StoreError(f"{operation} in {place(url)}: {cause}", hint=hint)


def _of_sqlite(database: str, cause: str) -> tuple[str, str] | None:
    path, folder = shlex.quote(database), shlex.quote(os.path.dirname(database) or ".")
    found = next(((meaning, command) for words, meaning, command in _SQLITE if words in cause), None)
    return found and (found[0], found[1].format(path=path, folder=folder))


def _of_postgres(url: URL, state: str, cause: str) -> tuple[str, str] | None:
    for key, meaning, command in _POSTGRES:
        by_state = len(key) <= 5 and key[0].isdigit()
        if state.startswith(key) if by_state else not state and key in cause:
            text, sql = (command, "") if isinstance(command, str) else command
            return meaning, text.format(reach=reach(url), server=reach(url, database=False), sql=shlex.quote(sql))
    return None
