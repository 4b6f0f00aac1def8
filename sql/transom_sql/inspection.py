"""Looking a database over: what it holds, and what is wrong with it. Nothing is changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, func, inspect, select

from transom_sql.causes import explained, place
from transom_sql.connect import sqlite_file
from transom_sql.copies import faults_of, side_files
from transom_sql.owner import owned_by
from transom_sql.tables import PENDING, TABLES, events, intents
from transom_sql.upgrade import connected, newest, steps, verified

_LARGE_LOG = 256 << 20
"""A write-ahead log of more bytes than this cannot be emptied: somebody reads for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that was looked at. ``wrong``: what to do about it, empty when it is as it should be."""

    name: str
    value: str
    wrong: str = ""


def look_over(url: str) -> list[Fact]:
    """Everything about a database. Raises StoreError where it cannot be read at all, and DatabaseTooNew."""
    with connected(url, create=False) as engine:
        revision = verified(engine)
        facts = [Fact(name="database", value=place(engine.url)), _schema(revision)]
        facts.append(Fact(name="owner", value=owned_by(engine) or "nobody: no transomd runs on it"))
        with explained(engine.url, "look the database over"):
            if revision is not None:
                with engine.connect() as connection:
                    facts += _contents(connection)
            facts += _of_postgres(engine) if engine.dialect.name == "postgresql" else _of_sqlite(engine)
    return facts


def _schema(revision: str | None) -> Fact:
    ahead = steps(revision)
    if not ahead:
        return Fact(name="schema", value=str(revision))
    value = f"{revision or 'empty'}, this transom's is {newest()}"
    return Fact(
        name="schema", value=value, wrong="transomd brings it up to date when it starts, or: transomd db upgrade"
    )


def _contents(connection: Connection) -> Iterator[Fact]:
    there = set(inspect(connection).get_table_names())
    counts = {
        table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
        for table in TABLES.values()
        if table.name in there
    }
    yield Fact(name="rows", value=", ".join(f"{count} {name}" for name, count in counts.items()))
    pending = connection.execute(select(func.count()).where(intents.c.state == PENDING)).scalar_one()
    yield Fact(name="pending intents", value=str(pending))
    first, last = connection.execute(select(func.min(events.c.id), func.max(events.c.id))).one()
    if last is not None:
        days = connection.execute(
            select(func.max(events.c.at) - func.min(events.c.at)).where(events.c.id.in_([first, last]))
        )
        yield Fact(name="history", value=f"{float(days.scalar_one()) / 86400:.1f} days of events")


def _of_postgres(engine: Engine) -> Iterator[Fact]:
    with engine.connect() as connection:
        query = (
            "SELECT pg_database_size(current_database()), current_setting('server_version'), current_setting('fsync')"
        )
        size, version, fsync = connection.exec_driver_sql(query).one()
    yield Fact(name="size", value=_size(size))
    yield Fact(name="server", value=f"Postgres {version}")
    lost = "a crash of the server's machine may lose what was recorded: set fsync = on in postgresql.conf"
    yield Fact(name="fsync", value=fsync, wrong="" if fsync == "on" else lost)


def _of_sqlite(engine: Engine) -> Iterator[Fact]:
    file = sqlite_file(engine.url)
    assert file is not None
    yield Fact(name="size", value=_size(file.stat().st_size))
    log = _bytes(side_files(file)[0])
    stuck = f"some process reads for ever; find it: fuser -v {file}" if log > _LARGE_LOG else ""
    yield Fact(name="write-ahead log", value=_size(log), wrong=stuck)
    mode = file.stat().st_mode & 0o777
    yield Fact(
        name="mode", value=f"{mode:04o}", wrong="" if mode & 0o077 == 0 else f"others may read it: chmod 0600 {file}"
    )
    with closing(engine.raw_connection()) as connection:
        driver = connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        faults = faults_of(driver)
    damaged = "stop transomd, then: transomd db restore BACKUP"
    yield Fact(
        name="integrity",
        value="; ".join(faults) or "every page and reference is whole",
        wrong=damaged if faults else "",
    )


def _bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
