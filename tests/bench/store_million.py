"""How a store reads with a million events, and how large it is.

``python tests/bench/store_million.py [sqlite|postgres]``.
Prints one line for each operation: its name, the median and the slowest of some runs in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from postgres_server import PostgresServer
from transom_sql.copies import copy_file
from transom_sql.engine import open_store
from transom_sql.inspection import look_over
from transom_sql.records import Attempt, Event, Incident, Intent, Job
from transom_sql.store import Change, Store

JOBS, EVENTS, INTENTS, BATCH = 5_000, 1_000_000, 50_000, 5_000
KINDS = ("state", "launch", "verdict", "act", "probe", "checkpoint")


def fill(store: Store) -> None:
    """Weeks of a busy site: 200 events a job, some of them of nodes."""
    for number in range(1, JOBS + 1):
        state = "running" if number > JOBS - 200 else "completed"
        job = store.add_job(
            Job(
                name=f"job{number}",
                user=f"u{number % 40}",
                uid=1000,
                spec={"nodes": 16, "command": "python train.py --lr 3e-4"},
                run_dir=f"/home/u/.transom/{number}",
                cwd="/home/u",
                token_sha256="9f" * 32,
                state=state,
                reason="all steps are done",
                created_at=number,
                changed_at=number,
            )
        )
        store.commit(
            Change(
                attempts=[Attempt(job_id=job.id, number=1, tag=f"transom:{job.id}:1", created_at=number)],
                incident=Incident(job_id=job.id, attempt=1, epoch=1, detected_at=number, summary="n3 does not answer"),
                intents=[
                    Intent(key=f"{kind}:{job.id}:{n}", kind=kind, state="done", created_at=number, job_id=job.id)
                    for kind in ("submit", "drain")
                    for n in range(INTENTS // JOBS // 2)
                ],
            )
        )
    for start in range(0, EVENTS, BATCH):
        store.add_events([_event(number) for number in range(start, start + BATCH)])


def _event(number: int) -> Event:
    return Event(
        at=float(number),
        kind=KINDS[number % len(KINDS)],
        message="n117: restarted in place on 15 nodes and one spare from step 48200",
        job_id=1 + number % JOBS,
        node=f"n{number % 1000}" if number % 4 == 0 else None,
        data={"epoch": number % 7, "nodes": ["n117", "n204"], "seconds": 12.25},
    )


def timed(name: str, call: Callable[[], object], runs: int = 15) -> None:
    """Print how long a call takes."""
    taken = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1000)
    print(f"{name:44} {statistics.median(taken):9.2f} {max(taken):9.2f}", flush=True)


def measure(store: Store, url: str, folder: Path) -> None:
    """Every read of the daemon and the command, and what an administrator does."""
    job = store.job(JOBS)
    assert job is not None
    held = [job]

    def commit() -> None:
        done = store.commit(Change(job=held[0], events=[_event(1)]))
        assert done is not None
        held[0] = replace(done, state="running")

    timed("commit a decision", commit, 100)
    timed("active jobs (200)", lambda: store.jobs(states=["running", "queued"]))
    timed("the newest 1000 jobs", lambda: store.jobs())
    timed("the last 1000 events", lambda: store.events())
    timed("events after an id (100)", lambda: store.events(after=500_000, limit=100))
    timed("events of a job (200)", lambda: store.events(job_id=77))
    timed("events of a node, the last 1000", lambda: store.events(node="n116"))
    timed("pending intents", lambda: store.intents(states=["pending"]))
    timed("all intents of a kind (25,000)", lambda: store.intents(kinds=["drain"]), 3)
    timed("all intents of a rare kind", lambda: store.intents(kinds=["undrain"]), 3)
    timed("all intents (50,000)", lambda: store.intents(), 3)
    timed("the last 1000 incidents", lambda: store.incidents())
    timed("look the database over", lambda: look_over(url), 1)
    timed("open", lambda: open_store(url).close(), 5)
    if url.startswith("sqlite"):
        file = Path(url.removeprefix("sqlite:///"))
        timed("back it up, verified", lambda: copy_file(file, folder / "copy.db", replace=True), 1)
        print(f"size {file.stat().st_size / 1e6:.0f} MB")
        (folder / "copy.db").unlink()


def main(kind: str) -> None:
    """Fill a store, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        server = PostgresServer(durable=True) if kind == "postgres" else None
        url = server.new_database() if server else f"sqlite:///{folder}/transom.db"
        try:
            with closing(open_store(url)) as store:
                begun = time.perf_counter()
                fill(store)
                print(f"filled in {time.perf_counter() - begun:.0f} s")
                if server:
                    server.sql("ANALYZE", database="t1")
                measure(store, url, Path(folder))
            if server:
                size = server.sql("SELECT pg_size_pretty(pg_database_size('t1'))")
                print(f"size {size}")
        finally:
            if server:
                server.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sqlite")
