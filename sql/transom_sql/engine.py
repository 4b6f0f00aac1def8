"""Opens the store."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import cache

from transom_sql.connect import connect
from transom_sql.owner import own
from transom_sql.sqlstore import SqlStore
from transom_sql.upgrade import upgrade_engine


def open_store(url: str, *, create: bool = True, owner: str = "") -> SqlStore:
    """The store in a database, brought to this program's schema; a missing SQLite file is made when ``create``.

    With ``owner``, a name that no other process has (:func:`transom_sql.owner.owner_name`), nobody else can open it as
    its owner until it is closed. Raises StoreError (cannot be reached, read, written; not transom's; owned by another,
    who is named) and DatabaseTooNew, which touched nothing.
    """
    with ExitStack() as undo:
        engine = connect(url, create=create)
        undo.callback(engine.dispose)
        ownership = own(engine, owner) if owner else None
        if ownership:
            undo.callback(ownership.release)
        upgrade_engine(engine)
        undo.pop_all()
    return SqlStore(engine, ownership)


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
