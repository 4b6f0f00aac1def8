"""A real Postgres for tests, in a folder of its own, reached over a Unix socket only."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

_CONF = """
listen_addresses = ''
unix_socket_directories = '{folder}'
fsync = {fsync}
max_connections = 50
shared_buffers = 32MB
timezone = 'UTC'
log_timezone = 'UTC'
"""
_IMPORTANT = os.environ.get("CI") == "true"


def programs() -> Path | None:
    """The folder of Postgres' server programs, of the newest version that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def require_postgres() -> Path:
    """Skip where Postgres is not installed; fail instead where it must be (CI=true)."""
    found = programs()
    if found is not None:
        return found
    reason = "NO REAL POSTGRES: initdb is not installed (Debian: postgresql), so nothing was tested on it"
    if _IMPORTANT:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class PostgresServer:
    """One server. ``durable``: what it acknowledges outlives a crash of the machine, which costs time."""

    def __init__(self, *, durable: bool = False) -> None:
        self.programs = require_postgres()
        self.folder = Path(tempfile.mkdtemp(prefix="tpg-", dir=None if durable else _memory()))
        self._as, user = _ordinary_user()
        if user:
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self._data = self.folder / "data"
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(self._data), "-U", "transom", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        with open(self._data / "postgresql.conf", "a") as conf:
            conf.write(_CONF.format(folder=self.folder, fsync="on" if durable else "off"))
        self.start()

    def _run(self, program: str, *args: str) -> str:
        argv = [*self._as, str(self.programs / program), *args]
        done = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start and wait until it answers."""
        with open(self.folder / "log", "ab") as log:
            argv = [*self._as, *self._with_us(), str(self.programs / "postgres"), "-D", str(self._data)]
            self._process = subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 30
        ready = [str(self.programs / "pg_isready"), "-q", "-h", str(self.folder)]
        while subprocess.run(ready, check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    @staticmethod
    def _with_us() -> list[str]:
        """The server ends with the tests, also when they are killed."""
        return ["setpriv", "--pdeathsig", "QUIT"] if shutil.which("setpriv") else []

    def stop(self, mode: str = "fast") -> None:
        """Stop: ``fast`` as an administrator does, ``immediate`` as a crash would."""
        if self._process is not None:
            self._run("pg_ctl", "stop", "-D", str(self._data), "-m", mode, "-w")
            self._process.wait(30)
            self._process = None

    def new_database(self, *, encoding: str = "UTF8") -> str:
        """Make an empty database and return its URL."""
        self._count += 1
        self.sql(f"CREATE DATABASE t{self._count} ENCODING '{encoding}' TEMPLATE template0")
        return self.url(f"t{self._count}")

    def url(self, database: str) -> str:
        """The URL of a database."""
        return f"postgresql+psycopg:///{database}?host={self.folder}&user=transom"

    def dump(self, database: str) -> str:
        """Everything in a database as SQL that any client can run."""
        said = self._run("pg_dump", "-h", str(self.folder), "-U", "transom", "--column-inserts", "--no-owner", database)
        # Newer versions guard what they write with commands of psql's own.
        return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("\\"))

    def sql(self, statement: str, *, database: str = "postgres") -> str:
        """Run a statement as the superuser, and return what psql prints."""
        argv = [str(self.programs / "psql"), "-h", str(self.folder), "-U", "transom", "-d", database]
        done = subprocess.run([*argv, "-XqAtc", statement], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def close(self) -> None:
        """Stop it and remove everything."""
        self.stop("immediate")
        shutil.rmtree(self.folder)


def _memory() -> str | None:
    """A folder in memory with room for many databases of 8 MB, if there is one."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return "/dev/shm" if found.f_bavail * found.f_frsize > 2 << 30 else None


def _ordinary_user() -> tuple[list[str], pwd.struct_passwd | None]:
    """How to run a program as an ordinary user, and whom: Postgres refuses root."""
    if os.geteuid() != 0:
        return [], None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"], user
