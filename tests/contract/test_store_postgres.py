"""What only Postgres can do to a store: go away in mid-commit, restart, refuse, and be set up wrongly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres_server import PostgresServer
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from transom_sql import postgres as dialect
from transom_sql.engine import open_store
from transom_sql.records import Event, Job
from transom_sql.store import Change, StoreError, Unsure
from transom_sql.tables import REVISION_TABLE, metadata

PROCESSES = Path(__file__).with_name("store_processes.py")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.new_database()


def event(message: str) -> Event:
    return Event(at=1.0, kind="k", message=message)


def job() -> Job:
    return Job(
        name="j", user="u", uid=1, spec={}, run_dir="/r", cwd="/c", token_sha256="", state="queued", reason="",
        created_at=1.0, changed_at=1.0,
    )  # fmt: skip


def refusal(url: str) -> StoreError:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert caught.value.hint
    return caught.value


def test_the_migrations_make_exactly_the_tables(url: str) -> None:
    open_store(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": REVISION_TABLE, "compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("statement", ["UPDATE events SET message = 'x'", "DELETE FROM events", "TRUNCATE events"])
def test_the_database_refuses_to_change_history(url: str, statement: str) -> None:
    with closing(open_store(url)) as store:
        store.add_events([event("as it was")])
        engine = create_engine(url)
        with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
            connection.execute(text(statement))
        engine.dispose()
        assert [found.message for found in store.events()] == ["as it was"]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_was_away_is_found_again(server: PostgresServer, url: str, mode: str) -> None:
    with closing(open_store(url, owner="me #1")) as store:
        added = store.add_job(job())
        server.stop(mode)
        for refused in (
            lambda: store.commit(Change(job=added, events=[event("never")])),
            lambda: store.job(added.id),
            lambda: store.add_events([event("never")]),
        ):
            with pytest.raises(StoreError) as caught:
                refused()
            assert "pg_isready -h" in caught.value.hint
        server.start()
        assert store.job(added.id) == added
        assert store.commit(Change(job=added, events=[event("now")])) is not None
        assert [found.message for found in store.events()] == ["now"]


def test_a_connection_that_is_lost_within_a_change_leaves_nothing_of_it(server: PostgresServer, url: str) -> None:
    with closing(open_store(url)) as store:
        added = store.add_job(job())
        database = make_url(url).database
        kill = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
        quit_now = "CREATE FUNCTION quit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$; "  # noqa: E501
        server.sql(quit_now + "CREATE TRIGGER q AFTER INSERT ON events EXECUTE FUNCTION quit()", database=database)
        with pytest.raises(StoreError) as caught:
            store.commit(Change(job=added, events=[event("never")]))
        assert not isinstance(caught.value, Unsure)
        server.sql("DROP TRIGGER q ON events", database=database)
        server.sql(kill)
        assert store.job(added.id) == added
        assert list(store.events()) == []


class Proxy:
    """Between a store and its server: may cut the connection as a commit is asked for, or as it is answered."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.cut: str = ""
        self.after_cut: Callable[[], object] = lambda: None
        self._to = str(server.folder / ".s.PGSQL.5432")
        self.folder = folder
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / ".s.PGSQL.5432"))
        self._listening.listen()
        self._open = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                self._open += [client, server]
                try:
                    server.connect(self._to)
                except OSError:
                    client.close()
                    continue
                self._threads += [
                    threading.Thread(target=self._pass, args=(client, server)),
                    threading.Thread(target=self._pass, args=(server, client)),
                ]
                for thread in self._threads[-2:]:
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                asked, answered = b"COMMIT\0" in data[:1] + data, b"COMMIT\0" in data and data[:1] == b"C"
                if (self.cut == "asked" and asked and not answered) or (self.cut == "answered" and answered):
                    self.cut = ""
                    self.after_cut()
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def proxy(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    made = Proxy(server, tmp_path_factory.mktemp("p"))
    yield made
    made.close()


def through(proxy: Proxy, url: str) -> str:
    return make_url(url).update_query_dict({"host": str(proxy.folder)}).render_as_string()


def test_a_commit_whose_answer_was_lost_is_known_to_have_arrived(proxy: Proxy, url: str) -> None:
    with closing(open_store(through(proxy, url))) as store:
        added = store.add_job(job())
        proxy.cut = "answered"
        changed = store.commit(Change(job=added, events=[event("once")]))
        assert proxy.cut == ""
        assert store.job(added.id) == changed
        assert [found.message for found in store.events()] == ["once"]


def test_a_commit_that_never_arrived_is_an_error(proxy: Proxy, url: str) -> None:
    with closing(open_store(through(proxy, url))) as store:
        added = store.add_job(job())
        proxy.cut = "asked"
        with pytest.raises(StoreError) as caught:
            store.commit(Change(job=added, events=[event("never")]))
        assert not isinstance(caught.value, Unsure)
        assert store.job(added.id) == added
        assert list(store.events()) == []


def test_nobody_knows_of_a_commit_while_the_server_is_away(
    server: PostgresServer, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "BUSY_SECONDS", 0.5)
    with closing(open_store(through(proxy, url))) as store:
        added = store.add_job(job())
        proxy.cut, proxy.after_cut = "answered", lambda: server.stop("fast")
        with pytest.raises(Unsure, match="does not say"):
            store.commit(Change(job=added, events=[event("once")]))
        server.start()
        found = store.job(added.id)
        assert found is not None
        assert (found.version, len(store.events())) == (2, 1)


def test_a_server_that_is_killed_loses_nothing_that_was_acknowledged() -> None:
    server = PostgresServer(durable=True)
    try:
        url = server.new_database()
        reading, writing = os.pipe()
        script = f"import sys; sys.path.insert(0, {str(PROCESSES.parent)!r}); from store_processes import write_for_ever; write_for_ever(sys.argv[1], {writing})"  # noqa: E501
        process = subprocess.Popen([sys.executable, "-c", script, url], pass_fds=[writing], stderr=subprocess.DEVNULL)
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            seen = b"".join(pipe.read(1) for _ in range(20))
            server.stop("immediate")
            seen += b"".join(iter(lambda: pipe.read(1), b""))
        assert process.wait(60) != -signal.SIGKILL
        server.start()
        with closing(open_store(url)) as store:
            count = store.jobs()[0].version - 1
            assert count in (len(seen), len(seen) + 1)
            numbers = [str(number) for number in range(1, count + 1)]
            assert [found.message for found in store.events(limit=None)] == numbers
            assert [found.tag for found in store.attempts(1)] == numbers
    finally:
        server.close()


def test_a_lock_that_somebody_holds_on_to_is_told(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dialect._SESSION, "lock_timeout", 100)
    with closing(open_store(url)) as store, psycopg.connect(url.replace("+psycopg", "")) as other:
        other.execute("LOCK TABLE events IN EXCLUSIVE MODE")
        with pytest.raises(StoreError, match="another process has been writing") as caught:
            store.add_events([event("late")])
        assert "pg_stat_activity" in caught.value.hint
        other.rollback()
        store.add_events([event("now")])
        assert [found.message for found in store.events()] == ["now"]


def test_a_database_that_cannot_hold_every_text_is_refused(server: PostgresServer) -> None:
    error = refusal(server.new_database(encoding="LATIN1"))
    assert "LATIN1" in str(error)
    assert "UTF8" in error.hint


def test_a_missing_database_is_named(server: PostgresServer) -> None:
    error = refusal(server.url("nowhere"))
    assert "no such user or database" in str(error)
    assert error.hint == f"psql -h {server.folder} -U transom -l"


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = refusal(f"postgresql://transom:secret@/x?host={tmp_path}")
    assert "cannot be reached" in str(error)
    assert error.hint == f"pg_isready -h {tmp_path} -U transom -d x"
    assert "secret" not in str(error)


def test_a_server_that_takes_no_writes_is_told(server: PostgresServer, url: str) -> None:
    open_store(url).close()
    database = make_url(url).database
    server.sql(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with closing(open_store(url)) as store, pytest.raises(StoreError, match="takes no writes"):
        store.add_events([event("never")])


def test_a_user_without_rights_is_told(server: PostgresServer, url: str) -> None:
    server.sql("CREATE ROLE guest LOGIN")
    database = make_url(url).database
    server.sql("REVOKE CREATE ON SCHEMA public FROM public", database=database)
    assert "this user may not" in str(refusal(url.replace("user=transom", "user=guest")))


def test_another_program_s_database_is_left_alone(server: PostgresServer, url: str) -> None:
    server.sql("CREATE TABLE bookmarks (id int)", database=make_url(url).database)
    assert "not transom's" in str(refusal(url))
