"""``transomd db``: copies that are whole, restores with a way back, and words for what is in the way."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from transom_sql import copies
from transom_sql.engine import open_store
from transom_sql.owner import owner_name
from transom_sql.records import Event, Job
from transom_sql.sqlstore import SqlStore
from transom_sql.store import Change, DatabaseTooNew, StoreError
from transom_sql.upgrade import newest

from transomd.dbtool import run
from transomd.errors import RefusedError, TransomError, UsageError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    state.mkdir()
    file = tmp_path / "transomd.toml"
    file.write_text(f'[daemon]\nstate_dir = "{state}"\n')
    return file


@pytest.fixture
def file(config: Path) -> Path:
    """The database of the site, with one job."""
    file = config.parent / "state" / "transom.db"
    with closing(open_store(f"sqlite:///{file}")) as store:
        store.add_job(job("first"), events=[event("submitted")])
    return file


@pytest.fixture
def store(file: Path) -> Iterator[SqlStore]:
    """As a daemon has it open."""
    with closing(open_store(f"sqlite:///{file}", owner=owner_name())) as opened:
        yield opened


def job(name: str) -> Job:
    return Job(
        name=name, user="u", uid=1, spec={}, run_dir="/r", cwd="/c", token_sha256="", state="queued", reason="",
        created_at=1.0, changed_at=1.0,
    )  # fmt: skip


def event(message: str) -> Event:
    return Event(at=1.0, kind="k", message=message)


def names(file: Path) -> list[str]:
    with closing(open_store(f"sqlite:///{file}")) as store:
        return [found.name for found in store.jobs()]


def refused(config: Path, *words: str) -> StoreError | TransomError:
    with pytest.raises((StoreError, TransomError)) as caught:
        run([*words], config)
    error = caught.value
    assert isinstance(error, (StoreError, TransomError))
    assert error.hint
    return error


def test_a_backup_is_one_private_file_that_holds_everything(
    config: Path, file: Path, store: SqlStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_job(job("in the write-ahead log"))
    target = config.parent / "b.db"
    assert run(["backup", str(target)], config) == 0
    assert "verified" in capsys.readouterr().out
    assert target.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in config.parent.iterdir() if "b.db" in found.name] == ["b.db"]
    assert names(target) == ["in the write-ahead log", "first"]


def test_a_backup_while_the_daemon_writes_is_a_moment_of_its_life(config: Path, store: SqlStore) -> None:
    """Every commit adds one event and one version; a copy in the middle of one would show."""
    stop, counts = threading.Event(), []

    def write() -> None:
        found = store.job(1)
        while not stop.is_set():
            assert found is not None
            found = store.commit(Change(job=found, events=[event("x")]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            assert run(["backup", str(config.parent / f"{number}.db")], config) == 0
    finally:
        stop.set()
        writer.join()
    for number in range(5):
        with closing(open_store(f"sqlite:///{config.parent}/{number}.db")) as copy:
            counts.append((copy.jobs()[0].version, len(copy.events(limit=None))))
    assert all(version == events for version, events in counts)
    assert counts == sorted(counts)
    assert counts[-1][0] > counts[0][0]


def test_a_backup_does_not_write_over_a_file(config: Path, file: Path) -> None:
    target = config.parent / "precious"
    target.write_text("x")
    assert isinstance(refused(config, "backup", str(target)), UsageError)
    assert target.read_text() == "x"


def test_a_backup_of_a_damaged_database_is_none(config: Path, file: Path) -> None:
    with open(file, "r+b") as raw:
        raw.seek(8192)
        raw.write(b"\xff" * 40000)
    assert "damaged" in str(refused(config, "backup", str(config.parent / "b.db")))
    assert sorted(found.name for found in config.parent.iterdir()) == ["state", "transomd.toml"]


def test_a_backup_into_no_folder_names_it(config: Path, file: Path) -> None:
    error = refused(config, "backup", str(config.parent / "none" / "b.db"))
    assert "No such file or directory" in str(error)


def test_a_restore_keeps_the_old_database_beside(config: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    with closing(open_store(f"sqlite:///{file}")) as store:
        assert store.add_job(job("second")).id == 2
    assert run(["restore", str(backup)], config) == 0
    said = capsys.readouterr().out
    kept = next(file.parent.glob("transom.db.replaced-*"))
    assert str(kept) in said
    assert names(kept) == ["second", "first"]
    with closing(open_store(f"sqlite:///{file}")) as store:
        assert [found.name for found in store.jobs()] == ["first"]
        assert store.events()[-1].kind == "restored"
        # Slurm may still run what the lost job 2 submitted: its id is never given out again.
        assert store.add_job(job("third")).id == 3


def test_a_restore_is_refused_while_a_daemon_runs(config: Path, file: Path, store: SqlStore) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    store.add_job(job("second"))
    assert "transomd on" in str(refused(config, "restore", str(backup)))
    assert len(store.jobs()) == 2
    assert not list(file.parent.glob("*replaced*"))


def test_a_restore_is_refused_while_another_program_has_it_open(config: Path, file: Path) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM jobs").fetchall()
        error = refused(config, "restore", str(backup))
        assert error.hint == f"fuser -v {file}"
    assert names(file) == ["first"]
    assert not list(file.parent.glob("*replaced*"))


def test_a_restore_replaces_a_damaged_database(config: Path, file: Path) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    file.write_bytes(b"SQLite format 3\0" + b"\xff" * 9000)
    damaged = file.read_bytes()
    assert run(["restore", str(backup)], config) == 0
    assert next(file.parent.glob("transom.db.replaced-*")).read_bytes() == damaged
    with closing(open_store(f"sqlite:///{file}")) as store:
        assert store.add_job(job("next")).id > 10_000


def test_a_restore_replaces_a_missing_database(config: Path, file: Path) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    for left in file.parent.iterdir():
        left.unlink()
    assert run(["restore", str(backup)], config) == 0
    assert names(file) == ["first"]


@pytest.mark.parametrize("kind", ["text", "foreign", "damaged", "empty", "missing", "newer"])
def test_a_restore_of_something_else_changes_nothing(config: Path, file: Path, kind: str) -> None:
    source = config.parent / "source"
    if kind == "text":
        source.write_text("not a database" * 1000)
    elif kind == "foreign":
        with closing(sqlite3.connect(source)) as connection:
            connection.execute("CREATE TABLE bookmarks (id)")
    elif kind == "empty":
        source.touch()
    elif kind != "missing":
        run(["backup", str(source)], config)
    if kind == "newer":
        with closing(sqlite3.connect(source)) as connection, connection:
            connection.execute("UPDATE transom_revision SET version_num = 'r9999_post'")
    if kind == "damaged":
        source.write_bytes(source.read_bytes()[:30_000])
    before = file.read_bytes()
    error = refused(config, "restore", str(source))
    assert isinstance(error, DatabaseTooNew) == (kind == "newer")
    assert str(source) in str(error)
    assert file.read_bytes() == before
    assert {found.name for found in file.parent.iterdir()} <= {"transom.db", "transom.db.lock"}


def test_a_restore_that_is_killed_at_its_last_step_leaves_the_old_one(
    config: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = config.parent / "b.db"
    run(["backup", str(backup)], config)
    with closing(open_store(f"sqlite:///{file}")) as store:
        store.add_job(job("second"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copies.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run(["restore", str(backup)], config)
    assert names(file) == ["second", "first"]


def test_a_check_tells_everything(
    config: Path, file: Path, store: SqlStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check"], config) == 0
    said = capsys.readouterr().out
    assert "transomd on" in said
    assert "1 jobs" in said
    assert "every page and reference is whole" in said
    assert newest() in said


def test_a_check_tells_what_is_wrong(config: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO checkpoints VALUES (99, 1, 1, '', 1.0, '')")
    file.chmod(0o644)
    assert run(["check"], config) == 1
    said = capsys.readouterr().out
    assert "a row of checkpoints refers to none of jobs" in said
    assert f"chmod 0600 {file}" in said
    assert "nobody" in said


def test_an_upgrade_makes_a_new_database_and_repeats(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["upgrade", "--pre"], config) == 0
    assert f"a new database → {newest()}" in capsys.readouterr().out
    assert run(["upgrade"], config) == 0
    assert "nothing was to be done" in capsys.readouterr().out


def test_the_program_says_errors_with_the_next_command(config: Path) -> None:
    argv = [sys.executable, "-m", "transomd.daemon", "--config", str(config), "db", "check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no such file" in done.stderr
    assert "next: ls -l" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture
def on_postgres(config: Path, server: PostgresServer) -> str:
    url = server.new_database()
    with open(config, "a") as settings:
        settings.write(f'database = "{url}"\n')
    with closing(open_store(url)) as store:
        store.add_job(job("first"))
    return url


def test_postgres_is_backed_up_by_its_own_program(
    config: Path, on_postgres: str, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{server.programs}:/usr/bin:/bin")
    target = config.parent / "b.dump"
    assert run(["backup", str(target)], config) == 0
    assert target.stat().st_mode & 0o777 == 0o600
    error = refused(config, "restore", str(target))
    assert isinstance(error, RefusedError)
    assert "systemctl stop transomd" in error.hint
    # What is told to type works.
    steps = [step for step in error.hint.split("; ") if not step.startswith(("systemctl", "transomd"))]
    subprocess.run(["bash", "-ec", "\n".join(steps)], check=True, capture_output=True)
    with closing(open_store(on_postgres)) as store:
        assert [found.name for found in store.jobs()] == ["first"]


def test_a_postgres_without_programs_is_told_what_to_type(
    config: Path, on_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    error = refused(config, "backup", str(config.parent / "b.dump"))
    assert "pg_dump -h" in error.hint
    with closing(open_store(on_postgres, owner=owner_name())):
        assert "stop it first" in str(refused(config, "restore", str(config)))


def test_a_postgres_is_checked(config: Path, on_postgres: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check"], config) == 1
    said = capsys.readouterr().out
    assert "set fsync = on" in said
    assert "1 jobs" in said
