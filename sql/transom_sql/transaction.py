"""One transaction that writes, and whether it arrived when the connection was lost at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from transom_sql.causes import place
from transom_sql.postgres import transaction_id, was_committed
from transom_sql.store import Unsure


@contextmanager
def transaction(engine: Engine, operation: str) -> Iterator[Connection]:
    """Commit what is written within, all or nothing. Raises Unsure where a lost connection leaves that open."""
    with engine.connect() as connection:
        begun = connection.begin()
        number = transaction_id(connection) if engine.dialect.name == "postgresql" else ""
        try:
            yield connection
        except BaseException:
            begun.rollback()
            raise
        try:
            begun.commit()
        except DBAPIError as error:
            if not (number and error.connection_invalidated):
                raise
            connection.close()
            _settle(engine, number, operation, error)


def _settle(engine: Engine, number: str, operation: str, error: DBAPIError) -> None:
    """Return when the transaction was committed after all; raise when it was not, or when nobody knows."""
    arrived = was_committed(engine, number)
    if arrived is None:
        raise Unsure(
            f"{operation} in {place(engine.url)}: the connection was lost as it was committed, "
            "and the server does not say whether it was",
            hint="journalctl -u transomd; on the database server: journalctl -u postgresql",
        ) from error
    if not arrived:
        raise error
