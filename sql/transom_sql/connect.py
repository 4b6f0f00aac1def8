"""Makes the connection to a database: SQLite's file and settings here, other databases as SQLAlchemy makes it."""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import ArgumentError

from transom_sql.causes import BUSY_SECONDS, explained
from transom_sql.copies import rescue
from transom_sql.postgres import postgres_engine, with_driver
from transom_sql.store import StoreError
from transom_sql.tables import to_json

_PRAGMAS = ("foreign_keys=ON", "synchronous=FULL", f"busy_timeout={BUSY_SECONDS * 1000}")
_LOOK_AGAIN = 0.02  # seconds
_EXAMPLE = "write the URL as sqlite:////var/lib/transom/transom.db or postgresql+psycopg://transom@host/transom"


def connect(url: str, *, create: bool) -> Engine:
    """An engine whose database can be reached; raises StoreError. Nothing in the database is changed.

    A missing SQLite file is made (mode 0600, empty) when ``create``. The engine's option ``transom_writes`` marks a
    connection whose transactions are going to write (see :func:`writer`).
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "postgresql":
        return _made(parsed, postgres_engine)
    file = sqlite_file(parsed)
    if file is not None:
        _check_folder(file)
        _check_file(file, create=create)
    # One connection holds a database in memory, and the pool lends it to one thread at a time.
    sizes = {} if file is not None else {"pool_size": 1, "max_overflow": 0}
    options = {"json_serializer": to_json, "hide_parameters": True, "creator": partial(_open, file)}
    engine = _made(parsed, partial(create_engine, poolclass=QueuePool, **options, **sizes))
    event.listen(engine, "connect", _set_pragmas)
    if file is not None:
        _watch(engine, file)
    event.listen(engine, "begin", _begin)
    return engine


def writer(engine: Engine) -> Engine:
    """The same engine for transactions that write."""
    return engine.execution_options(transom_writes=True)


def sqlite_file(url: URL) -> Path | None:
    """The file of a SQLite database; None where it lives in memory or is another kind of database."""
    in_memory = url.database in (None, "", ":memory:")
    return None if in_memory or url.get_backend_name() != "sqlite" else Path(str(url.database))


def settle(engine: Engine) -> None:
    """Give a SQLite file what stays with it: write-ahead log, mode 0600. Raises StoreError where it cannot have it."""
    file = sqlite_file(engine.url)
    if file is None:
        return
    with explained(engine.url, "open the database"), closing(engine.raw_connection()) as connection:
        mode = _write_ahead(connection.cursor(), time.monotonic() + BUSY_SECONDS)
    if mode != "wal":
        raise _refused(file, "its file system cannot hold a write-ahead log; use a local disk", "df -T {folder}")
    _make_private(file)


def _write_ahead(cursor: DBAPICursor, deadline: float) -> str:
    """Switch to a write-ahead log; return the mode that SQLite is in. For this one lock SQLite itself does not wait."""
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return str(cursor.fetchall()[0][0])
        except sqlite3.OperationalError as error:
            if "is locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_AGAIN)


def parse_url(url: str) -> URL:
    """A URL of a kind of database that transom knows, with its driver; raises StoreError."""
    try:
        parsed = with_driver(make_url(url))
    except ArgumentError:
        raise StoreError("open the database: its URL cannot be read", hint=_EXAMPLE) from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"open the database: transom knows no {parsed.get_backend_name()}", hint=_EXAMPLE)
    return parsed


def _made(url: URL, make: Callable[[URL], Engine]) -> Engine:
    """The engine, which shows no parameters in its errors: they hold users' data."""
    try:
        return make(url)
    except ModuleNotFoundError as error:
        extra = "pip install 'transom[postgres]'" if error.name == "psycopg" else f"pip install {error.name}"
        raise StoreError(f"open a {url.drivername} database: {error}", hint=extra) from error
    except (ImportError, ArgumentError) as error:
        raise StoreError(f"open a {url.drivername} database: {error}", hint=_EXAMPLE) from error


def _watch(engine: Engine, file: Path) -> None:
    """Refuse every transaction while the file that was opened is not the one with its name.

    SQLite itself would go on in a file that was deleted, and all of it would be lost with the process.
    """
    opened: list[tuple[int, int]] = []
    rescued: dict[str, Path | None] = {}

    def remember(_connection: object, _record: object) -> None:
        opened.extend(_identity(file) if not opened else ())

    def look(connection: Connection) -> None:
        now = _identity(file)
        if now == opened:
            rescued.clear()
            return
        if not now and not rescued:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            rescued["file"] = rescue(driver, file)
        raise _missed(file, replaced=bool(now), rescued=rescued.get("file"))

    event.listen(engine, "connect", remember)
    event.listen(engine, "begin", look)


def _missed(file: Path, *, replaced: bool, rescued: Path | None) -> StoreError:
    cause = "another file has taken its place" if replaced else "it was removed while it was in use"
    if rescued:
        cause += f"; what it held is saved in {rescued}"
    backup = shlex.quote(str(rescued)) if rescued else "BACKUP"
    restore = f"systemctl stop transomd; transomd db restore {backup}; systemctl start transomd"
    return _refused(file, cause, restore, operation="use")


def _identity(file: Path) -> list[tuple[int, int]]:
    """Device and inode; nothing where no file is."""
    try:
        found = file.stat()
    except OSError:
        return []
    return [(found.st_dev, found.st_ino)] if stat.S_ISREG(found.st_mode) else []


def _open(file: Path | None) -> sqlite3.Connection:
    """Open a file that is there, never make one: it would stand in the place of one that was removed."""
    where = f"file:{quote(str(file))}?mode=rw" if file is not None else ":memory:"
    return sqlite3.connect(where, uri=file is not None, check_same_thread=False, isolation_level=None)


def _set_pragmas(connection: Any, _record: object) -> None:
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    """Begin by hand: the driver begins too late for reads, and a writer that has read first could not wait its turn."""
    writes = connection.get_execution_options().get("transom_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_folder(file: Path) -> None:
    folder = file.parent
    if not folder.is_dir():
        raise _refused(file, f"there is no folder {folder}", "mkdir -p -m 0700 {folder}")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise _refused(file, f"the folder {folder} may not be written by this user", "ls -ld {folder}")


def _check_file(file: Path, *, create: bool) -> None:
    """Existing files are not opened: closing one would drop the locks that SQLite holds on it in this process."""
    if create:
        _make_file(file)
    if not file.exists():
        raise _refused(file, "there is no such file", "ls -l {folder}")
    if not file.is_file():
        raise _refused(file, "this is not a file", "ls -ld {path}")
    if not os.access(file, os.R_OK | os.W_OK, effective_ids=True):
        raise _refused(file, "the file may not be read and written by this user", "ls -l {path}")


def _make_file(file: Path) -> None:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise _refused(file, str(error.strerror), "df -hi {folder}") from error


def _make_private(file: Path) -> None:
    """The database holds users' logs: only its owner reads it. SQLite gives its side files the same mode."""
    if file.stat().st_mode & 0o077 == 0:
        return
    try:
        file.chmod(0o600)
    except OSError as error:
        raise _refused(file, f"others may read it ({error.strerror})", "chmod 0600 {path}") from error


def _refused(file: Path, cause: str, command: str, *, operation: str = "open") -> StoreError:
    path, folder = shlex.quote(str(file)), shlex.quote(str(file.parent))
    return StoreError(f"{operation} the database {file}: {cause}", hint=command.format(path=path, folder=folder))
