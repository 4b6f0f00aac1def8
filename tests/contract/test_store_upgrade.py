"""Upgrades keep what the last release wrote, leave a copy behind, and come in a half that the last release can bear."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from sqlalchemy import create_engine, text
from store_rows import GOLDEN, MARK, store_at, write_rows
from transom_sql import upgrade as upgrading
from transom_sql.engine import memory_store, open_store
from transom_sql.postgres import lock_upgrade
from transom_sql.restore import restore_file
from transom_sql.store import DatabaseTooNew, Store, StoreError
from transom_sql.upgrade import copy_of, current, newest, steps, upgrade

LAST = "r0001_pre"
PROCESSES = Path(__file__).with_name("store_processes.py")
KINDS = ["sqlite", "postgresql"]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of an empty database."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/transom.db"
    server: PostgresServer = request.getfixturevalue("server")
    return server.new_database()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite database that the last release left behind."""
    load(f"sqlite:///{tmp_path}/transom.db", dump("sqlite"))
    return tmp_path / "transom.db"


def dump(kind: str) -> str:
    return (GOLDEN / f"{LAST}.{kind}.sql").read_text()


def load(url: str, script: str) -> None:
    """Run a script of many statements, as the last release's superuser."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.executescript(script)
    else:
        with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
            connection.execute(script.encode())


def inserts(kind: str) -> str:
    """What the last release wrote: rows with only the columns that it knew, in the order of references."""
    if kind == "sqlite":
        lines = dump(kind).partition(MARK)[2].splitlines()
    else:
        lines = ["SET session_replication_role = replica;", *dump(kind).splitlines()]
    return "\n".join(line for line in lines if line.startswith(("INSERT", "SET session")) and "revision" not in line)


def everything(store: Store) -> tuple[object, ...]:
    of_jobs = [(store.attempts(j.id), store.launches(j.id), store.checkpoints(j.id)) for j in store.jobs(limit=None)]
    return store.jobs(limit=None), of_jobs, store.incidents(), store.intents(), store.events(), store.nodes()


def expected() -> tuple[object, ...]:
    with closing(memory_store()) as store:
        write_rows(store)
        return everything(store)


@pytest.fixture
def more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release to come: one step that the present one can bear, then one that it cannot, then one that it could."""
    folder, before = tmp_path / "versions", newest()
    folder.mkdir()
    for name, statement in [
        ("r9001_pre", "ALTER TABLE nodes ADD COLUMN rack TEXT NOT NULL DEFAULT ''"),
        ("r9001_post", "ALTER TABLE nodes DROP COLUMN data"),
        ("r9002_pre", "CREATE TABLE racks (name TEXT PRIMARY KEY)"),
    ]:
        (folder / f"{name}_x.py").write_text(
            f"from alembic import op\nrevision, down_revision = {name!r}, {before!r}\n\n"
            f"def upgrade():\n    op.execute({statement!r})\n"
        )
        before = name
    monkeypatch.setattr(upgrading, "_VERSIONS", [*upgrading._VERSIONS, str(folder)])


def test_what_the_last_release_wrote_is_kept(url: str, kind: str) -> None:
    load(url, dump(kind))
    with closing(open_store(url)) as store:
        assert everything(store) == expected()
        assert store.add_job(store.jobs()[0]).id == 3
    assert current(url) == newest()


def test_the_last_release_can_write_after_the_pre_half(url: str, kind: str) -> None:
    store_at(url, LAST).close()
    with closing(store_at(url, LAST)) as running:
        before = everything(running)
        upgrade(url, half="pre")
        assert everything(running) == before
        load(url, inserts(kind))
        assert everything(running) == expected()
    assert current(url) == steps(LAST, "pre")[-1]


@pytest.mark.usefixtures("more")
def test_the_pre_half_ends_before_the_first_step_that_needs_the_new_release(url: str) -> None:
    upgrade(url)
    assert current(url) == "r9002_pre"
    assert steps(LAST)[-3:] == ["r9001_pre", "r9001_post", "r9002_pre"]
    assert steps(LAST, "pre")[-1] == "r9001_pre"


@pytest.mark.usefixtures("more")
def test_halves_follow_one_another(url: str, kind: str) -> None:
    load(url, dump(kind))
    first = upgrade(url, half="pre")
    assert (first.found, first.reached) == (LAST, "r9001_pre")
    assert upgrade(url, half="pre").backup is None
    second = upgrade(url, half="post")
    assert (second.found, second.reached) == ("r9001_pre", "r9002_pre")
    copies = [first.backup, second.backup]
    file = Path(url.removeprefix("sqlite:///"))
    assert copies == ([copy_of(file, LAST), copy_of(file, "r9001_pre")] if kind == "sqlite" else [None, None])


def test_an_upgrade_begins_with_a_copy(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        before = list(connection.iterdump())
    done = upgrade(f"sqlite:///{file}")
    assert done.backup == copy_of(file, LAST)
    assert done.backup.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(done.backup)) as connection:
        assert list(connection.iterdump()) == before


def test_a_database_that_is_ahead_is_refused_with_the_way_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(f"sqlite:///{file}")
    as_it_is = file.read_bytes()
    known = upgrading._known()
    monkeypatch.setattr(upgrading, "_known", lambda: {LAST})
    with pytest.raises(DatabaseTooNew) as caught:
        open_store(f"sqlite:///{file}")
    assert caught.value.hint.endswith(f"transomd db restore {copy_of(file, LAST)}")
    assert file.read_bytes() == as_it_is
    restored = restore_file(copy_of(file, LAST), file, now=1.0, stamp="s")
    assert restored.revision == LAST
    monkeypatch.setattr(upgrading, "_known", lambda: known)
    with closing(open_store(f"sqlite:///{file}")) as store:
        assert everything(store)[:4] == expected()[:4]
        assert [event.kind for event in store.events()][-1] == "restored"


FULL_DISK = """
import shutil, sqlite3, sys
from contextlib import closing
from pathlib import Path
from transom_sql.copies import copy_file
from transom_sql.store import StoreError
from transom_sql.upgrade import upgrade, current
from transom_sql.restore import restore_file

file = Path("/mnt/transom.db")
shutil.copy(sys.argv[1], file)

def rows():
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())

before = rows()
with open("/mnt/filler", "wb", buffering=0) as filler:
    try:
        while filler.write(b"x" * 4096):
            pass
    except OSError:
        pass
for work in [
    lambda: upgrade("sqlite:////mnt/transom.db"),
    lambda: copy_file(file, Path("/mnt/copy.db")),
    lambda: restore_file(Path(sys.argv[1]), file, now=1.0, stamp="s"),
]:
    try:
        work()
    except StoreError as error:
        print(error, "|", error.hint)
Path("/mnt/filler").unlink()
assert current("sqlite:////mnt/transom.db") == "r0001_pre"
assert rows() == before, "the old database was touched"
print(sorted(path.name for path in Path("/mnt").iterdir()))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_old_database_as_it_was(file: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m none /mnt && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, FULL_DISK, str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *said, left = done.stdout.splitlines()
    assert len(said) == 3
    assert all("disk is full" in line or "No space left" in line or "disk I/O" in line for line in said), said
    assert all("| df -h /mnt" in line for line in said), said
    assert set(re.findall(r"'(.*?)'", left)) <= {"transom.db", "transom.db-shm", "transom.db-wal", "transom.db.lock"}


def test_a_failed_upgrade_leaves_the_database_and_its_copy(file: Path, more: None) -> None:
    broken = Path(upgrading._VERSIONS[-1]) / "r9002_pre_x.py"
    broken.write_text(broken.read_text().replace("CREATE TABLE racks", "CREATE TABLE jobs"))
    with pytest.raises(StoreError, match="already exists"):
        upgrade(f"sqlite:///{file}")
    assert current(f"sqlite:///{file}") == LAST
    assert copy_of(file, LAST).exists()
    # The next try begins with a copy of its own in the same place: a daemon that tries for ever fills no disk.
    with pytest.raises(StoreError, match="already exists"):
        upgrade(f"sqlite:///{file}")
    assert len(list(file.parent.glob("transom.db.at-*"))) == 1


def test_upgrades_wait_for_one_another(server: PostgresServer) -> None:
    url = server.new_database()
    engine = create_engine(url)
    with engine.begin() as first:
        lock_upgrade(first)
        waiting = subprocess.Popen([sys.executable, PROCESSES, "open", url, "3"])
        query = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        while first.execute(query).scalar() != 3:
            assert waiting.poll() is None
        assert first.execute(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")).scalar() == 0
    assert waiting.wait(60) == 0
    engine.dispose()
    assert current(url) == newest()
