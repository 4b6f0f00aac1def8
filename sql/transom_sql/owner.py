"""Owning a database: one daemon writes to it, and a second is refused by the name of the first."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from transom_sql.causes import explained
from transom_sql.connect import sqlite_file, writer
from transom_sql.postgres import describe_owner, owner_of, owning_engine
from transom_sql.store import StoreError

_PATIENCE, _LOOK_AGAIN = 1.0, 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Ownership:
    """``writer`` is the engine for transactions that write; ``release`` gives the database to the next."""

    writer: Engine
    release: Callable[[], None]


def owner_name(program: str = "transomd") -> str:
    """A name for this process that no other has, also among containers that are all called alike."""
    return f"{program} on {socket.gethostname()[:32]}, process {os.getpid()} #{secrets.token_hex(4)}"


def own(engine: Engine, owner: str) -> Ownership:
    """Own the engine's database. Raises StoreError, which names the holder, when another does."""
    file = sqlite_file(engine.url)
    if file is not None:
        return Ownership(writer(engine), own_file(file, owner))
    if engine.dialect.name != "postgresql":
        return Ownership(writer(engine), lambda: None)
    owning = owning_engine(engine.url, owner)
    try:
        with explained(engine.url, "own the database"), owning.connect():
            return Ownership(owning, owning.dispose)
    except BaseException:
        owning.dispose()
        raise


def owned_by(engine: Engine) -> str:
    """Who owns the engine's database now; empty when nobody does."""
    file = sqlite_file(engine.url)
    if file is not None:
        return _holder(lock_file(file))
    with explained(engine.url, "ask who owns the database"), engine.connect() as connection:
        return owner_of(connection)


def lock_file(file: Path) -> Path:
    """The file whose lock owns a SQLite database, and which names the owner. It stays when the owner is gone."""
    return file.with_name(f"{file.name}.lock")


def own_file(file: Path, owner: str) -> Callable[[], None]:
    """Own a SQLite file, be it there or not; return what gives it up. Raises StoreError, which names the holder.

    SQLite's own locks would not do: a reader that closes the database file drops them.
    """
    where = lock_file(file)
    try:
        held = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"open {where}: {error.strerror}", hint=f"ls -ld {shlex.quote(str(where.parent))}") from error
    try:
        _flock(held)
        os.ftruncate(held, 0)
        os.pwrite(held, owner.encode(), 0)
    except BlockingIOError:
        os.close(held)
        raise StoreError(
            f"open the database {file}: {_holder(where) or 'another process'} owns it; nothing was touched",
            hint="stop that one first, or leave it to it: one transomd a database",
        ) from None
    except OSError as error:
        os.close(held)
        hint = f"df -h {shlex.quote(str(where.parent))}"
        raise StoreError(f"own the database {file}: {error.strerror}", hint=hint) from error
    return lambda: os.close(held)


def _flock(held: int) -> None:
    """Take the lock; tried for a second, since who asks for the owner's name holds it for a moment."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_AGAIN)


def _holder(where: Path) -> str:
    """The name in a lock file, while its lock is held."""
    try:
        with open(where, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return describe_owner(file.read())
    except OSError:
        pass
    return ""
