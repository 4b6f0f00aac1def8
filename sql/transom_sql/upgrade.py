"""Brings a database to the schema of this program, and never touches one that is ahead of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from transom_sql.causes import explained, place
from transom_sql.connect import connect, settle, sqlite_file, writer
from transom_sql.copies import copy_file
from transom_sql.postgres import lock_upgrade
from transom_sql.store import DatabaseTooNew, StoreError
from transom_sql.tables import REVISION_TABLE

Half = Literal["pre", "post"]
"""How far: *pre* stops before the first step that the running release could not live with; *post* goes all the way."""

_VERSIONS = ["transom_sql:migrations/versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """What an upgrade did: from where (None: a new database), to where, and the copy made before (None: none)."""

    found: str | None
    reached: str
    backup: Path | None = None


def upgrade(url: str, *, half: Half = "post") -> Upgraded:
    """Bring a database to this program's revision, or half the way; a missing SQLite file is made.

    Raises DatabaseTooNew, and then touched nothing, and StoreError. All steps are one transaction.
    """
    with connected(url, create=True) as engine:
        return upgrade_engine(engine, half=half)


def current(url: str) -> str | None:
    """The revision of a database, None for an empty one; raises StoreError. Changes nothing."""
    with connected(url, create=False) as engine, _reading(engine) as connection:
        return _revision(connection)


def verified(engine: Engine) -> str | None:
    """As :func:`current`, on an engine; raises as :func:`upgrade` does where this program cannot use the database."""
    with _reading(engine) as connection:
        return _check(connection, newest())


def newest() -> str:
    """The revision that this program writes and reads."""
    return str(_scripts().get_current_head())


def steps(found: str | None, half: Half = "post") -> list[str]:
    """The revisions that lead from one to this program's, in their order; for *pre* up to the first *post*."""
    ahead = [script.revision for script in _scripts().iterate_revisions("head", found or "base")][::-1]
    return list(takewhile(lambda revision: revision.endswith("_pre"), ahead)) if half == "pre" else ahead


def upgrade_engine(engine: Engine, *, half: Half = "post") -> Upgraded:
    """As :func:`upgrade`, on an engine of :func:`transom_sql.connect.connect`."""
    wanted, copy = newest(), None
    with _reading(engine) as connection:
        found = _check(connection, wanted)
    settle(engine)
    if not steps(found, half):
        return Upgraded(found=found, reached=str(found))
    with explained(engine.url, f"upgrade the database to {wanted}"), writer(engine).begin() as connection:
        if engine.dialect.name == "postgresql":
            lock_upgrade(connection)
        found = _check(connection, wanted)
        ahead = steps(found, half)
        if ahead:
            # Nobody else can write now, so the copy is what the upgrade begins with.
            copy = _copy_before(engine, found)
            command.upgrade(_config(connection), ahead[-1])
    return Upgraded(found=found, reached=ahead[-1] if ahead else str(found), backup=copy)


def _copy_before(engine: Engine, found: str | None) -> Path | None:
    file = sqlite_file(engine.url)
    if file is None or found is None:
        return None
    return copy_file(file, copy_of(file, found), replace=True)


def copy_of(file: Path, revision: str) -> Path:
    """Where the copy of a SQLite database lies that is made before it leaves a revision."""
    return file.with_name(f"{file.name}.at-{revision}")


@contextmanager
def connected(url: str, *, create: bool) -> Iterator[Engine]:
    """An engine of :func:`transom_sql.connect.connect`, disposed of at the end."""
    engine = connect(url, create=create)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    with explained(engine.url, "read the schema's revision"), engine.connect() as connection:
        yield connection


def _check(connection: Connection, wanted: str) -> str | None:
    """The revision found; refuses one that this program does not know, and another program's database."""
    # Tables first: another process may make them all at any moment.
    tables, where = inspect(connection).get_table_names(), place(connection.engine.url)
    found = _revision(connection)
    if found is None and tables:
        raise StoreError(
            f"open the database {where}: it holds tables that are not transom's",
            hint="give transomd a database of its own: set the database URL in transomd.toml",
        )
    if found is not None and found not in _known():
        raise DatabaseTooNew(
            f"open the database {where}: it is at revision {found}, this transom knows up to {wanted}; "
            "nothing was touched. There is no way back but a copy made before the upgrade",
            hint=f"install the transom that wrote it (pip install --upgrade transom), or go back to the copy: "
            f"{_way_back(connection.engine)}",
        )
    return found


def _known() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}


def _way_back(engine: Engine) -> str:
    """The exact command that brings back the newest copy that this program can use."""
    file = sqlite_file(engine.url)
    if file is None:
        return "transomd db restore -h"
    copies = [copy for revision in _known() if (copy := copy_of(file, revision)).exists()]
    newest_copy = max(copies, key=lambda copy: copy.stat().st_mtime, default=None)
    return f"transomd db restore {shlex.quote(str(newest_copy)) if newest_copy else 'BACKUP'}"


def _revision(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE})
    return context.get_current_revision()


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "transom_sql:migrations")
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(_VERSIONS))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
