"""Opening a database: what is made, what is refused, and the words for it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from transom_sql import connect as connecting
from transom_sql import upgrade as upgrading
from transom_sql.engine import open_store
from transom_sql.records import Event
from transom_sql.store import DatabaseTooNew, StoreError
from transom_sql.upgrade import Upgraded, current, newest, upgrade

NOBODY = 65534


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "transom.db"


@pytest.fixture
def unprivileged_file() -> Iterator[Path]:
    """A path in a folder of an ordinary user, as whom the test runs."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    yield folder / "transom.db"
    if root:
        os.seteuid(0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


def url(file: Path) -> str:
    return f"sqlite:///{file}"


def make(file: Path) -> None:
    store = open_store(url(file))
    store.add_events([Event(at=1.0, kind="k", message="kept")])
    store.close()


def refusal(file: Path, *, create: bool = True) -> StoreError:
    with pytest.raises(StoreError) as caught:
        open_store(url(file), create=create)
    assert str(file) in str(caught.value)
    assert caught.value.hint
    return caught.value


def pragma(file: Path, name: str) -> object:
    engine = connecting.connect(url(file), create=False)
    try:
        with engine.connect() as connection:
            return connection.exec_driver_sql(f"PRAGMA {name}").scalar()
    finally:
        engine.dispose()


def test_a_new_database_is_private_and_durable(file: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store(url(file))
        store.add_events([Event(at=1.0, kind="k", message="m")])
        assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
        assert len(list(file.parent.iterdir())) == 3
        store.close()
    finally:
        os.umask(old)
    full = 2
    settings = {name: pragma(file, name) for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")}
    assert settings == {"journal_mode": "wal", "synchronous": full, "foreign_keys": 1, "busy_timeout": 5_000}


def test_an_open_database_is_made_private(file: Path) -> None:
    make(file)
    file.chmod(0o644)
    open_store(url(file)).close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_missing_database_is_made_only_when_asked(file: Path) -> None:
    assert "there is no such file" in str(refusal(file, create=False))
    assert not file.exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "no where" / "transom.db")
    assert error.hint == f"mkdir -p -m 0700 '{tmp_path}/no where'"


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    assert "not a file" in str(refusal(tmp_path))


def test_a_file_of_another_kind_is_left_alone(file: Path) -> None:
    file.write_text("#!/bin/sh\necho this is somebody's script\n" * 100)
    before = file.read_bytes(), file.stat().st_mode
    assert "not a SQLite database" in str(refusal(file))
    assert (file.read_bytes(), file.stat().st_mode) == before


def test_a_database_of_another_program_is_left_alone(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE bookmarks (id INTEGER)")
    connection.close()
    before = file.read_bytes()
    assert "not transom's" in str(refusal(file))
    assert file.read_bytes() == before


def test_a_damaged_database_is_named(file: Path) -> None:
    make(file)
    content = bytearray(file.read_bytes())
    content[100:4096] = b"\xff" * 3996
    file.write_bytes(content)
    assert "integrity_check" in refusal(file).hint


def test_a_newer_database_is_refused_and_not_touched(file: Path) -> None:
    make(file)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("UPDATE transom_revision SET version_num = 'r9999_post'")
    connection.close()
    file.chmod(0o640)
    before = file.read_bytes(), file.stat()
    with pytest.raises(DatabaseTooNew) as caught:
        open_store(url(file))
    assert "r9999_post" in str(caught.value)
    assert newest() in str(caught.value)
    assert caught.value.hint
    with pytest.raises(DatabaseTooNew):
        upgrade(url(file))
    after = file.read_bytes(), file.stat()
    assert (after[0], after[1].st_mtime_ns, after[1].st_mode) == (before[0], before[1].st_mtime_ns, before[1].st_mode)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_upgrading_tells_the_revision_and_is_repeatable(file: Path) -> None:
    with pytest.raises(StoreError):
        current(url(file))
    assert upgrade(url(file)) == Upgraded(found=None, reached=newest())
    assert upgrade(url(file)) == Upgraded(found=newest(), reached=newest())
    assert current(url(file)) == newest()


def test_a_failed_upgrade_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = upgrading.command.upgrade

    def fail_late(config: Config, revision: str) -> None:
        whole(config, revision)
        raise KeyboardInterrupt

    monkeypatch.setattr(upgrading.command, "upgrade", fail_late)
    with pytest.raises(KeyboardInterrupt):
        open_store(url(file))
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT * FROM sqlite_master").fetchall() == []
    connection.close()
    monkeypatch.undo()
    make(file)


def test_a_read_only_file_is_named(unprivileged_file: Path) -> None:
    unprivileged_file.touch(0o400)
    error = refusal(unprivileged_file)
    assert "may not be read and written" in str(error)
    assert error.hint == f"ls -l {unprivileged_file}"


def test_a_read_only_folder_is_named(unprivileged_file: Path) -> None:
    unprivileged_file.parent.chmod(0o500)
    error = refusal(unprivileged_file)
    assert "folder" in str(error)
    assert error.hint == f"ls -ld {unprivileged_file.parent}"


def test_a_writer_that_waits_too_long_says_for_whom(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(file)
    monkeypatch.setattr(connecting, "_PRAGMAS", ("foreign_keys=ON", "busy_timeout=50"))
    store = open_store(url(file))
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process") as caught:
        store.add_events([Event(at=1.0, kind="k", message="late")])
    assert caught.value.hint == f"fuser -v {file}"
    assert len(store.events()) == 1
    other.execute("ROLLBACK")
    store.add_events([Event(at=1.0, kind="k", message="now")])
    other.close()
    store.close()


def test_opening_waits_for_another_that_opens(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(connecting, "BUSY_SECONDS", 0)
    assert "another process" in str(refusal(file))
    monkeypatch.undo()
    waited: list[float] = []

    def let_go(seconds: float) -> None:
        waited.append(seconds)
        other.execute("ROLLBACK")

    monkeypatch.setattr("transom_sql.connect.time.sleep", let_go)
    open_store(url(file)).close()
    assert len(waited) == 1
    other.close()


FULL_DISK = """
import sys
from transom_sql.engine import open_store
from transom_sql.records import Event
from transom_sql.store import StoreError

store = open_store("sqlite:////mnt/transom.db")
count = 0
try:
    while True:
        store.add_events([Event(at=1.0, kind="k", message="x" * 10_000)])
        count += 1
except StoreError as error:
    print(error, error.hint, sep="\\n")
print(count, len(store.events(limit=None)))
store.close()
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small file system needs root")
def test_a_full_disk_loses_nothing_that_was_recorded() -> None:
    mount = 'mount -t tmpfs -o size=2m none /mnt && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, FULL_DISK],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    message, hint, counts = done.stdout.splitlines()
    assert "/mnt/transom.db: the disk is full" in message
    assert hint == "df -h /mnt"
    recorded, found = counts.split()
    assert recorded == found != "0"


@pytest.mark.parametrize("wrong", ["transom.db", "mysql://host/transom", "postgresql+nodriver://host/transom"])
def test_a_wrong_url_is_answered_with_a_right_one(wrong: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(wrong)
    assert "sqlite:////" in caught.value.hint


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://transom:secret@host/transom")
    assert "secret" not in str(caught.value) + caught.value.hint


def test_a_file_that_was_removed_takes_no_more_writes_and_is_saved(file: Path) -> None:
    store = open_store(url(file))
    store.add_events([Event(at=1.0, kind="k", message="in the write-ahead log")])
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    for refused in (lambda: store.add_events([Event(at=1.0, kind="k", message="lost")]), store.events):
        with pytest.raises(StoreError, match="removed while it was in use") as caught:
            refused()
        assert f"transomd db restore {file}.rescued" in caught.value.hint
    rescued = open_store(f"sqlite:///{file}.rescued", create=False)
    assert [found.message for found in rescued.events()] == ["in the write-ahead log"]
    rescued.close()
    elsewhere.rename(file)
    store.add_events([Event(at=1.0, kind="k", message="back again")])
    assert len(store.events()) == 2
    for name in ("transom.db", "transom.db-wal", "transom.db-shm"):
        file.with_name(name).unlink()
    with pytest.raises(StoreError, match="saved in"):
        store.events()
    assert not file.exists()
    rescued = open_store(f"sqlite:///{file}.rescued", create=False)
    assert [found.message for found in rescued.events()][-1] == "back again"
    rescued.close()
    store.close()


def test_a_file_that_was_replaced_is_not_written(file: Path) -> None:
    make(file)
    store = open_store(url(file))
    other = file.with_name("other.db")
    make(other)
    other.rename(file)
    before = file.read_bytes()
    with pytest.raises(StoreError, match="another file has taken its place"):
        store.add_events([Event(at=1.0, kind="k", message="lost")])
    store.close()
    assert file.read_bytes() == before
