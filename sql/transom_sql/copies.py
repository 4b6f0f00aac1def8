"""Whole and verified copies of a SQLite database, also while it is written to."""

from __future__ import annotations

import os
import shlex
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from urllib.parse import quote

from transom_sql.causes import BUSY_SECONDS, explain_file
from transom_sql.store import StoreError

_PAGES_A_TURN = -1
"""All at once: readers do not hold up a writer, and a copy in turns would begin anew with every commit."""


def copy_file(source: Path, target: Path, *, replace: bool = False) -> Path:
    """Copy a database as it is at one moment to one file, mode 0600, on the disk and verified; return the file.

    Raises StoreError, and then ``target`` is as it was: also when the disk is full, the source is damaged, or (without
    ``replace``) the target is there already.
    """
    with prepared_copy(source, target) as copy:
        publish(copy, target, replace=replace)
    return target


def rescue(connection: sqlite3.Connection, file: Path) -> Path | None:
    """Write what a removed database still holds for those who have it open; return the file, None where that failed."""
    target = file.with_name(f"{file.name}.rescued")
    try:
        with prepared_copy(file, target, connection) as copy:
            publish(copy, target, replace=True)
    except StoreError:
        return None
    return target


@contextmanager
def prepared_copy(source: Path, target: Path, opened: sqlite3.Connection | None = None) -> Iterator[Path]:
    """A verified copy beside ``target``, removed at the end if it is still there. Raises StoreError.

    ``opened`` is a connection to the source; without it one is made.
    """
    operation = f"copy the database {source} to {target}"
    with explain_file(operation, target):
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(descriptor)
    copy = Path(name)
    try:
        with explain_file(operation, source), nullcontext(opened) if opened else closing(open_file(source)) as origin:
            origin.execute("SELECT count(*) FROM sqlite_master").fetchone()
            with explain_file(operation, target):
                _copy(origin, copy)
        verify(copy, source)
        yield copy
    finally:
        for left in (copy, *side_files(copy)):
            left.unlink(missing_ok=True)


def _copy(origin: sqlite3.Connection, copy: Path) -> None:
    with closing(sqlite3.connect(copy)) as target:
        origin.backup(target, pages=_PAGES_A_TURN)
        # The write-ahead log would make a second file of it.
        target.execute("PRAGMA journal_mode=DELETE")
    _flush(copy)


def open_file(file: Path) -> sqlite3.Connection:
    """Open a database that is there; a missing file is not made."""
    return sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=BUSY_SECONDS)


def verify(copy: Path, source: Path) -> None:
    """Read every page of a copy. Raises StoreError, which speaks of what it is a copy of."""
    with explain_file(f"verify the copy of {source}", source), closing(open_file(copy)) as connection:
        faults = faults_of(connection)
    if faults:
        cause = f"the database is damaged: {'; '.join(faults)}"
        raise StoreError(f"verify the copy of {source}: {cause}", hint="transomd db restore BACKUP, one that is older")


def faults_of(connection: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong in a whole database; at most ten sentences."""
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(10)")]
    orphans = connection.execute("PRAGMA foreign_key_check").fetchmany(10)
    return [said for said in found if said != "ok"] + [
        f"a row of {row[0]} refers to none of {row[2]}" for row in orphans
    ]


def publish(copy: Path, target: Path, *, replace: bool) -> None:
    """Give a copy its name, in one step that outlives a power cut. Raises StoreError, and then changed nothing."""
    with explain_file(f"write {target}", target):
        try:
            os.replace(copy, target) if replace else os.link(copy, target)
        except FileExistsError:
            name = shlex.quote(str(target))
            raise StoreError(f"write {target}: there is such a file already", hint=f"ls -l {name}") from None
        _flush(target.parent)


def side_files(file: Path) -> tuple[Path, Path]:
    """SQLite's files beside a database: the write-ahead log and its index."""
    return file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
