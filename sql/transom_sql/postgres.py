"""What Postgres needs to be told, and what it is asked beyond SQL: who owns the database, whether a commit arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from transom_sql.causes import BUSY_SECONDS
from transom_sql.store import StoreError
from transom_sql.tables import to_json

OLDEST = 13
"""The first version with pg_xact_status."""

_OWN, _UPGRADE = 0x7472616E736F6D01, 0x7472616E736F6D02
"""Keys of the advisory locks, which Postgres keeps for each database: "transom" in ASCII, and a number."""

_DRIVERS = ("postgresql", "postgres")
_UPGRADE_SECONDS = 600
_LOOK_AGAIN = 0.05  # seconds

# A session must notice within half a minute that the other side is gone: a dead owner would keep its lock for hours.
_SESSION = {
    "lock_timeout": BUSY_SECONDS * 1000,
    "synchronous_commit": "on",
    "idle_in_transaction_session_timeout": 60_000,
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
}
_CLIENT = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_HOLDER = """
    SELECT a.pid, a.application_name, coalesce(host(a.client_addr), 'this host'), a.backend_start
    FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.mode = 'ExclusiveLock'
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (l.classid::bigint << 32 | l.objid::bigint) = %s
"""


def with_driver(url: URL) -> URL:
    """The URL with the driver that transom uses, where it names none."""
    return url.set(drivername="postgresql+psycopg") if url.drivername in _DRIVERS else url


def postgres_engine(url: URL, *, name: str = "transom", **options: Any) -> Engine:
    """An engine whose sessions wait no longer than they should and are on the disk when they say so."""
    wanted = " ".join(f"-c {key}={value}" for key, value in _SESSION.items())
    given = url.query.get("options", "")
    arguments = {**_CLIENT, "application_name": name, "options": f"{given} {wanted}".strip()}
    engine = create_engine(
        url,
        json_serializer=to_json,
        hide_parameters=True,
        use_native_hstore=False,
        pool_pre_ping=True,
        connect_args=arguments,
        **options,
    )
    event.listen(engine, "connect", _check_server)
    return engine


def _check_server(connection: Any, _record: object) -> None:
    """Refuse a server that is too old, or a database that cannot hold every text."""
    info = connection.info
    name, encoding, number = info.dbname, info.parameter_status("server_encoding"), info.server_version // 10_000
    if encoding == "UTF8" and number >= OLDEST:
        return
    connection.close()
    if number < OLDEST:
        raise StoreError(f"open the database {name}: Postgres {number} is too old", hint=f"use {OLDEST} or later")
    raise StoreError(
        f"open the database {name}: its encoding is {encoding}, which cannot hold every text",
        hint="createdb -T template0 -E UTF8 -O transom transom",
    )


def owning_engine(url: URL, owner: str) -> Engine:
    """An engine of one connection that owns the database, in which nothing can be written without owning it.

    The lock lives as long as the connection. A new connection has to take it again, so a daemon that was cut off writes
    nothing after another one took over. Connecting raises StoreError, which names the holder.
    """
    engine = postgres_engine(url, name=owner[:63], pool_size=1, max_overflow=0)

    def take(connection: Any, _record: object) -> None:
        deadline = time.monotonic() + BUSY_SECONDS
        while not _one(connection, "SELECT pg_try_advisory_lock(%s)", _OWN)[0]:
            holder = _one(connection, _HOLDER, _OWN)
            _refuse_other(connection, holder, owner)
            # What is left of this daemon's own former connection, which the server has not yet missed.
            if holder:
                _one(connection, "SELECT pg_terminate_backend(%s)", holder[0])
            if time.monotonic() > deadline:
                _refuse_other(connection, holder, "")
            time.sleep(_LOOK_AGAIN)

    event.listen(engine, "connect", take)
    return engine


def _refuse_other(connection: Any, holder: tuple[Any, ...] | None, owner: str) -> None:
    if holder is None or holder[1] == owner[:63]:
        return
    name = connection.info.dbname
    connection.close()
    pid, who, where, since = holder
    raise StoreError(
        f"open the database {name}: {describe_owner(who)} owns it, from {where} since {since:%Y-%m-%d %H:%M:%S%z}, "
        f"Postgres process {pid}; nothing was touched",
        hint="stop that one first, or leave it to it: one transomd a database",
    )


def owner_of(connection: Connection) -> str:
    """Who owns the database now; empty when nobody does."""
    found = _one(connection.connection.dbapi_connection, _HOLDER, _OWN)
    return describe_owner(found[1]) if found else ""


def describe_owner(owner: str) -> str:
    """An owner's name without the mark that makes it its own."""
    return owner.rpartition("#")[0].strip() or owner


def _one(connection: Any, query: str, value: int) -> Any:
    """The first row of a query, outside of any transaction."""
    before, connection.autocommit = connection.autocommit, True
    try:
        return connection.execute(query, (value,)).fetchone()
    finally:
        connection.autocommit = before


def lock_upgrade(connection: Connection) -> None:
    """Wait until no other process upgrades this database; the lock ends with the transaction."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_UPGRADE_SECONDS * 1000}")
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_UPGRADE})")
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {BUSY_SECONDS * 1000}")


def transaction_id(connection: Connection) -> str:
    """The number of the running transaction, by which its fate can be asked for."""
    return str(connection.exec_driver_sql("SELECT pg_current_xact_id()::text").scalar_one())


def was_committed(engine: Engine, number: str, clock: Callable[[], float] = time.monotonic) -> bool | None:
    """Whether a transaction was committed whose connection was lost; None when the server does not say in time."""
    deadline = clock() + BUSY_SECONDS
    while clock() < deadline:
        try:
            with engine.connect() as connection:
                query = f"SELECT pg_xact_status('{number}'::xid8)"
                status = connection.exec_driver_sql(query).scalar()
        except SQLAlchemyError:
            status = "in progress"
        if status != "in progress":
            return None if status is None else status == "committed"
        time.sleep(_LOOK_AGAIN)
    return None
