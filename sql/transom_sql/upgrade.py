"""Brings a database to the schema of this program, and never touches one that is ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from transom_sql.causes import explained, place
from transom_sql.connect import connect, settle, writer
from transom_sql.store import DatabaseTooNew, StoreError
from transom_sql.tables import REVISION_TABLE


def upgrade(url: str) -> str:
    """Bring a database to this program's revision and return it; a missing SQLite file is made.

    Raises DatabaseTooNew, and then touched nothing, and StoreError. All steps are one transaction.
    """
    with _connected(url, create=True) as engine:
        return upgrade_engine(engine)


def current(url: str) -> str | None:
    """The revision of a database, None for an empty one; raises StoreError. Changes nothing."""
    with _connected(url, create=False) as engine, _reading(engine) as connection:
        return _revision(connection)


def newest() -> str:
    """The revision that this program writes and reads."""
    return str(_scripts().get_current_head())


def upgrade_engine(engine: Engine) -> str:
    """As :func:`upgrade`, on an engine of :func:`transom_sql.connect.connect`."""
    wanted = newest()
    with _reading(engine) as connection:
        found = _check(connection, wanted)
    settle(engine)
    if found != wanted:
        with explained(engine.url, f"upgrade the database to {wanted}"), writer(engine).begin() as connection:
            _check(connection, wanted)
            command.upgrade(_config(connection), "head")
    return wanted


@contextmanager
def _connected(url: str, *, create: bool) -> Iterator[Engine]:
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
    found, where = _revision(connection), place(connection.engine.url)
    if found is None and inspect(connection).get_table_names():
        raise StoreError(
            f"open the database {where}: it holds tables that are not transom's",
            hint="give transomd a database of its own: set the database URL in transomd.toml",
        )
    if found is not None and found not in {script.revision for script in _scripts().walk_revisions()}:
        raise DatabaseTooNew(
            f"open the database {where}: it is at revision {found}, this transom knows up to {wanted}; "
            "nothing was touched",
            hint="install the transom that wrote it, or a newer one: pip install --upgrade transom",
        )
    return found


def _revision(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE})
    return context.get_current_revision()


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "transom_sql:migrations")
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
