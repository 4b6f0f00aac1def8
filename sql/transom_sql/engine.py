"""Opens the store."""

from __future__ import annotations

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
    return open_store("sqlite://")
