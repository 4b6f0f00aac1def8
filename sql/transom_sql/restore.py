"""Putting a backup in the place of a SQLite database, with a way back at every moment."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from transom_sql.causes import explain_file
from transom_sql.copies import open_file, prepared_copy, publish, side_files
from transom_sql.owner import own_file, owner_name
from transom_sql.store import StoreError
from transom_sql.upgrade import connected, verified

_LEAP = 10_000
"""How far ids leap where the old database does not tell which it has given out since the backup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The revision of what is now the database, and where the old one lies (None: there was none)."""

    revision: str
    kept: Path | None


def restore_file(source: Path, target: Path, *, now: float, stamp: str) -> Restored:
    """Put a copy of ``source`` in the place of ``target``; the old database is kept as ``target.replaced-<stamp>``.

    Raises StoreError, and then the old database is in its place: a daemon owns it, another process has it open,
    ``source`` is damaged, newer than this program or not transom's, the disk is full.
    """
    if not source.is_file():
        raise StoreError(f"restore {source}: there is no such file", hint=f"ls -l {source.parent}")
    release = own_file(target, owner_name("transomd db restore"))
    try:
        with prepared_copy(source, target) as copy:
            revision = _revision(copy, source)
            _go_on_after(copy, target, source, now)
            kept = _keep(target, target.with_name(f"{target.name}.replaced-{stamp}"))
            publish(copy, target, replace=True)
    finally:
        release()
    return Restored(revision=revision, kept=kept)


def _revision(copy: Path, source: Path) -> str:
    """The revision of a copy that this program can use; errors speak of what it is a copy of."""
    try:
        with connected(f"sqlite:///{copy}", create=False) as engine:
            revision = verified(engine)
    except StoreError as error:
        raise type(error)(str(error).replace(str(copy), str(source)), hint="choose another backup") from error
    if revision is None:
        raise StoreError(f"restore {source}: it is an empty database", hint="choose another backup")
    return revision


def _go_on_after(copy: Path, target: Path, source: Path, now: float) -> None:
    """Write into the copy that it was restored, and have it number on where the old database was.

    A job's id is in the names of its Slurm jobs, some of which may still run: it is never given out twice.
    """
    used = _given_out(target)
    with explain_file(f"prepare {copy}", copy), closing(open_file(copy)) as connection, connection:
        for name, number in connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall():
            beyond = max(number, used.get(name, 0)) if used is not None else number + _LEAP
            connection.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (beyond, name))
        for name in set(used or ()) - {row[0] for row in connection.execute("SELECT name FROM sqlite_sequence")}:
            connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, (used or {})[name]))
        message = f"the database was restored from {source}; what happened between is not in it"
        connection.execute(
            "INSERT INTO events (at, kind, message, data) VALUES (?, 'restored', ?, '{}')", (now, message)
        )


def _given_out(target: Path) -> dict[str, int] | None:
    """The highest id of each table of the old database; None when it cannot be read."""
    if not target.exists():
        return None
    try:
        with closing(open_file(target)) as connection:
            return dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    except sqlite3.DatabaseError:
        return None


def _keep(target: Path, kept: Path) -> Path | None:
    """Give the old database a second name, and empty its side files, so that one rename can take its place."""
    if not target.exists():
        for left in side_files(target):
            left.unlink(missing_ok=True)
        return None
    with explain_file(f"keep {target} as {kept}", target):
        try:
            with closing(open_file(target)) as connection:
                connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            pass  # Damaged: what lies beside it is kept with it, and may help to mend it.
        for old, new in zip((target, *side_files(target)), (kept, *side_files(kept)), strict=True):
            if old.exists():
                os.link(old, new)
        for left in side_files(target):
            left.unlink(missing_ok=True)
    return kept
