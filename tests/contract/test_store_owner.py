"""One owner for one database: the second is refused by name, and an owner that was cut off cannot write any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from transom_sql.engine import open_store
from transom_sql.owner import owned_by, owner_name
from transom_sql.postgres import _OWN
from transom_sql.records import Event
from transom_sql.store import StoreError
from transom_sql.upgrade import connected

HOLD = """
import sys, time
from transom_sql.engine import open_store
from transom_sql.owner import owner_name
store = open_store(sys.argv[1], owner=owner_name())
print("owned", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/transom.db"
    server: PostgresServer = request.getfixturevalue("server")
    return server.new_database()


@pytest.fixture
def on_postgres(server: PostgresServer) -> str:
    return server.new_database()


def event(message: str) -> Event:
    return Event(at=1.0, kind="k", message=message)


def who(url: str) -> str:
    with connected(url, create=False) as engine:
        return owned_by(engine)


def test_a_second_owner_is_refused_by_the_name_of_the_first(url: str) -> None:
    with closing(open_store(url, owner=owner_name())) as first:
        first.add_events([event("first")])
        with pytest.raises(StoreError) as caught:
            open_store(url, owner=owner_name())
        assert f"process {os.getpid()} owns it" in str(caught.value)
        assert "#" not in str(caught.value)
        assert caught.value.hint
        assert f"process {os.getpid()}" in who(url)
    assert who(url) == ""
    with closing(open_store(url, owner=owner_name())) as second:
        assert [found.message for found in second.events()] == ["first"]


def test_who_owns_nothing_can_read(url: str) -> None:
    with closing(open_store(url, owner=owner_name())) as owner, closing(open_store(url)) as reader:
        owner.add_events([event("x")])
        assert len(reader.events()) == 1


def test_a_killed_owner_gives_the_database_up(url: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "owned\n"
    with pytest.raises(StoreError, match=f"process {holder.pid} owns it"):
        open_store(url, owner=owner_name())
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    while who(url):
        pass
    open_store(url, owner=owner_name()).close()


def test_two_that_start_at_once_become_one_owner(url: str) -> None:
    open_store(url).close()
    start, held, refused = threading.Barrier(4), [], []

    def take() -> None:
        start.wait()
        try:
            held.append(open_store(url, owner=owner_name()))
        except StoreError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 3)
    held[0].close()


def test_an_owner_that_was_cut_off_writes_nothing_after_another_took_over(server: PostgresServer) -> None:
    url = server.new_database()
    with closing(open_store(url, owner=owner_name())) as first:
        first.add_events([event("of the first")])
        server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'transomd%'")
        with closing(open_store(url, owner=owner_name())) as second:
            with pytest.raises(StoreError, match="owns it"):
                first.add_events([event("too late")])
            second.add_events([event("of the second")])
            assert [found.message for found in first.events()] == ["of the first", "of the second"]
        first.add_events([event("of the first again")])
        assert len(first.events()) == 3


def test_an_owner_ends_what_is_left_of_its_own_connection(on_postgres: str) -> None:
    """As after a cut cable: the server still holds the lock for a connection that its owner has given up."""
    name = owner_name()
    with psycopg.connect(
        on_postgres.replace("postgresql+psycopg", "postgresql"), application_name=name, autocommit=True
    ) as left:
        left.execute("SELECT pg_advisory_lock(%s)", (_OWN,))
        with closing(open_store(on_postgres, owner=name)) as store:
            store.add_events([event("x")])
        with pytest.raises(psycopg.OperationalError):
            left.execute("SELECT 1")
