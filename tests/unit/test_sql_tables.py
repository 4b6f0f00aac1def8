"""The tables fit the records, and the migrations make the tables."""

from __future__ import annotations

import dataclasses
import importlib
import io
import typing
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from transom_sql.connect import connect
from transom_sql.engine import memory_store
from transom_sql.records import Event, NodeRecord
from transom_sql.store import Change
from transom_sql.tables import DONE, DROPPED, FAILED, PENDING, REVISION_TABLE, TABLES, metadata
from transom_sql.upgrade import upgrade_engine

from transomd.words import IntentState


@pytest.fixture
def migrated() -> Iterator[Engine]:
    engine = connect("sqlite://", create=True)
    upgrade_engine(engine)
    yield engine
    engine.dispose()


def schema(engine: Engine) -> set[tuple[str, ...]]:
    """Tables and indices as SQLite keeps them; a table's constraints may stand in any order."""
    query = text("SELECT sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL")
    with engine.connect() as connection:
        found = [" ".join(row.split()) for row in connection.execute(query).scalars() if REVISION_TABLE not in row]
    return {tuple(sorted(part.strip(" )") for part in row.split(","))) for row in found}


@pytest.mark.parametrize("record", list(TABLES), ids=lambda record: record.__name__)
def test_a_table_has_a_column_for_each_field(record: type) -> None:
    hints = typing.get_type_hints(record)
    optional = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}
    columns = TABLES[record].columns
    assert [column.name for column in columns] == [found.name for found in dataclasses.fields(record)]
    assert {column.name for column in columns if column.nullable} == optional


def test_the_store_knows_the_daemons_words_for_intents() -> None:
    assert [str(state) for state in IntentState] == [PENDING, DONE, FAILED, DROPPED]


def test_migrations_from_nothing_make_exactly_the_tables(migrated: Engine) -> None:
    fresh = create_engine("sqlite://")
    metadata.create_all(fresh)
    assert schema(migrated) == schema(fresh)
    fresh.dispose()
    with migrated.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE, "compare_type": True})
        assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET message = 'rewritten'",
        "DELETE FROM events",
        "INSERT OR REPLACE INTO events (id, at, kind, message, data) VALUES (1, 1.0, 'k', 'rewritten', '{}')",
    ],
)
def test_the_database_refuses_to_change_history(migrated: Engine, statement: str) -> None:
    with migrated.begin() as connection:
        connection.execute(text("INSERT INTO events (at, kind, message, data) VALUES (1.0, 'k', 'as it was', '{}')"))
    with pytest.raises(DBAPIError, match="append-only"), migrated.begin() as connection:
        connection.execute(text(statement))
    with migrated.connect() as connection:
        assert connection.execute(text("SELECT message FROM events")).scalars().all() == ["as it was"]


def test_the_schema_can_be_written_for_postgres() -> None:
    written = io.StringIO()
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": written})
    with Operations.context(context):
        for name in ("r0001_pre_first_tables", "r0002_pre_switches"):
            importlib.import_module(f"transom_sql.migrations.versions.{name}").upgrade()
    schema = written.getvalue()
    assert schema.count("CREATE TABLE") == len(TABLES)
    assert "BEFORE UPDATE OR DELETE OR TRUNCATE ON events" in schema
    assert "id BIGSERIAL NOT NULL" in schema
    assert "AUTOINCREMENT" not in schema


def test_a_store_in_memory_is_a_new_one_each_time() -> None:
    first, second = memory_store(), memory_store()
    first.commit(Change(nodes=[NodeRecord(name="n1", changed_at=1.0)], events=[Event(at=1.0, kind="k", message="m")]))
    assert (len(first.nodes()), len(second.nodes()), len(second.events())) == (1, 0, 0)
    first.close()
    second.close()
