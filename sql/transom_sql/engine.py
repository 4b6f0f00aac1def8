"""Opens the store."""

from __future__ import annotations

from contextlib import closing
from functools import cache

from transom_sql.connect import connect
from transom_sql.sqlstore import SqlStore
from transom_sql.upgrade import upgrade_engine


def open_store(url: str, *, create: bool = True) -> SqlStore:
    """The store in a database, brought to this program's schema; a missing SQLite file is made when ``create``.

    Raises StoreError (cannot be reached, read, written; not transom's) and DatabaseTooNew, which touched nothing.
    """
    engine = connect(url, create=create)
    try:
        upgrade_engine(engine)
    except BaseException:
        engine.dispose()
        raise
    return SqlStore(engine)


def memory_store() -> SqlStore:
    """An empty store in memory, gone when it is closed: for tests, dry runs and the simulator."""
    engine = connect("sqlite://", create=True)
    with closing(engine.raw_connection()) as connection:
        connection.driver_connection.executescript(_memory_schema())  # type: ignore[union-attr]
    return SqlStore(engine)


@cache
def _memory_schema() -> str:
    """What the migrations make, kept as SQL: a simulation opens many stores, and migrating takes ten times as long."""
    engine = connect("sqlite://", create=True)
    upgrade_engine(engine)
    with closing(engine.raw_connection()) as connection:
        schema = "\n".join(connection.driver_connection.iterdump())  # type: ignore[union-attr]
    engine.dispose()
    return schema
