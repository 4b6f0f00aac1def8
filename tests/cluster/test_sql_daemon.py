"""Whole jobs while the daemon's database is away: nothing is done without a record, and all of it afterwards."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from jobs import ENOUGH_S, Site, check_end
from postgres_server import PostgresServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

AWAY_S = 30.0


def drained(site: Site) -> set[str]:
    """What Slurm itself says: the daemon may not answer now."""
    told = site.sandbox.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout.split("\n")
    return {line.split()[0] for line in told if "drain" in line}


def log(site: Site) -> str:
    return (site.root / "transomd.log").read_text()


def lose_a_node(site: Site, away: Callable[[], object], back: Callable[[], object], said: str) -> None:
    """A node dies while the database is away: the daemon does nothing, says why, and goes on afterwards."""
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    away()
    begun = time.monotonic()
    try:
        site.sandbox.fail("n2", "power")
        site.wait(lambda: said in log(site), f"the daemon says: {said}")
        with pytest.raises(AssertionError) as refused:
            site.submit("--steps 1")
        told = said in str(refused.value)
        assert told or "no answer within" in str(refused.value)
        while time.monotonic() < begun + AWAY_S:
            assert drained(site) == set(), "a node was drained without a record"
            assert site.daemon is not None
            assert site.daemon.poll() is None, "the daemon ended"
            time.sleep(0.5)
    finally:
        back()
    site.wait_state(job, "completed")
    # A launcher that restarted on its grant has left the node out by itself, and then nothing is drained.
    assert drained(site) <= {"n2"}
    detail = check_end(site, job, drained=drained(site))
    assert len(detail["launches"]) == 2
    assert not told or len(site.client.get("/v1/jobs", all=1)["jobs"]) == 1, "a submission that was refused left a job"


def test_a_node_is_lost_while_another_process_locks_the_database(site: Site) -> None:
    other = sqlite3.connect(site.root / "state" / "transom.db", timeout=30, isolation_level=None)

    with closing(other):
        lose_a_node(
            site,
            lambda: other.execute("BEGIN EXCLUSIVE"),
            lambda: other.execute("ROLLBACK"),
            "another process has been writing",
        )


def test_a_node_is_lost_while_the_database_is_removed(site: Site) -> None:
    file = site.root / "state" / "transom.db"
    elsewhere = file.with_name("elsewhere")
    lose_a_node(
        site, lambda: os.rename(file, elsewhere), lambda: os.rename(elsewhere, file), "removed while it was in use"
    )
    with sqlite3.connect(f"{file}.rescued") as rescued:
        assert rescued.execute("SELECT name FROM jobs").fetchall() == [("ring",)]
    rescued.close()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.folder.chmod(0o755)
    yield server
    server.close()


@pytest.fixture
def site_on_postgres(site: Site, postgres: PostgresServer) -> Site:
    site.stop_daemon()
    settings: Path = site.root / "transomd.toml"
    text = settings.read_text().replace("cycle_s = 0.5", f'cycle_s = 0.5\ndatabase = "{postgres.new_database()}"')
    settings.write_text(text)
    site.start_daemon()
    return site


def test_a_node_is_lost_while_postgres_is_stopped(site_on_postgres: Site, postgres: PostgresServer) -> None:
    lose_a_node(site_on_postgres, postgres.stop, postgres.start, "cannot be reached")


def test_a_second_daemon_on_one_database_is_refused(site: Site, tmp_path: Path) -> None:
    text = (site.root / "transomd.toml").read_text()
    database = f"sqlite:///{site.root}/state/transom.db"
    other = text.replace(f'state_dir = "{site.root}/state"', f'state_dir = "{tmp_path}"\ndatabase = "{database}"')
    config = tmp_path / "other.toml"
    config.write_text(other.replace("d.sock", "other.sock"))
    argv = [sys.executable, "-m", "transomd.daemon", "--config", str(config)]
    done = site.sandbox.run(argv, check=False, timeout=ENOUGH_S)
    assert done.returncode == 1
    assert "owns it" in done.stderr
    assert "next: stop that one first" in done.stderr
    assert site.client.get("/v1/daemon")["slurm"]["ok"]
