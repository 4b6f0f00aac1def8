"""A backup of a Postgres database, made by Postgres' own program."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import URL

from transom_sql.causes import explain_file, place, reach
from transom_sql.copies import publish
from transom_sql.store import StoreError


def dump(url: URL, target: Path) -> Path:
    """Dump a database to one new file in pg_dump's custom format, mode 0600, and return the file. Raises StoreError."""
    operation = f"back up {place(url)} to {target}"
    by_hand = f"pg_dump {reach(url)} -Fc -f {shlex.quote(str(target))}"
    program, lister = shutil.which("pg_dump"), shutil.which("pg_restore")
    if not (program and lister):
        raise StoreError(
            f"{operation}: pg_dump is not installed here", hint=f"on a machine with Postgres' programs: {by_hand}"
        )
    with explain_file(operation, target):
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    copy = Path(name)
    try:
        os.close(descriptor)
        env = {**os.environ, "PGCONNECT_TIMEOUT": "10", **({"PGPASSWORD": url.password} if url.password else {})}
        _run([program, *shlex.split(reach(url)), "-w", "-Fc", "-f", name], env, operation, by_hand)
        _run([lister, "--list", name], env, f"verify the backup {target}", by_hand)
        publish(copy, target, replace=False)
    finally:
        copy.unlink(missing_ok=True)
    return target


def _run(argv: list[str], env: dict[str, str], operation: str, by_hand: str) -> None:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())[:500]
        raise StoreError(f"{operation}: {said}", hint=f"by hand: {by_hand}")


def restore_by_hand(url: URL, source: Path) -> str:
    """The commands that put a dump in the place of a Postgres database, and keep the old one."""
    to = reach(url, database=False)
    name = shlex.quote(str(url.database))
    kept = f'ALTER DATABASE "{url.database}" RENAME TO "{url.database}-replaced"'
    return "; ".join(
        [
            "systemctl stop transomd",
            f"psql {to} -d postgres -c {shlex.quote(kept)}",
            f"createdb {to} -T template0 -E UTF8 {name}",
            f"pg_restore {to} -d {name} --no-owner --single-transaction {shlex.quote(str(source))}",
            "transomd db check",
            "systemctl start transomd",
        ]
    )
