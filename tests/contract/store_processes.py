"""Processes that write to a store at once or are killed while they do; run by test_store.py.

``kill URL TIMES`` forks a writer, kills it with SIGKILL at a random moment, looks at what is left, and again; prints
how often it killed and how many commits were found. ``compete URL TIMES`` changes one job that others change too.
``open URL TIMES`` opens one database from that many processes at once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace

from sqlalchemy import create_engine, text
from transom_sql.engine import open_store
from transom_sql.records import Attempt, Event, Intent, Job
from transom_sql.store import Change, Conflict, Store

OPENING, COMMITTING = 0.08, 0.004
"""Seconds within which the kill falls: about as long as it takes to open a new database, and to commit twice."""


def add_job(store: Store) -> Job:
    return store.add_job(
        Job(
            name="", user="", uid=0, spec={}, run_dir="", cwd="", token_sha256="", state="1", reason="", created_at=0.0,
            changed_at=0.0,
        )
    )  # fmt: skip


def write_for_ever(url: str, acknowledge: int) -> None:
    """Commit number N has everything named N; its number is written to a pipe once it is committed."""
    store = open_store(url)
    found = store.jobs()
    job = found[0] if found else add_job(store)
    while True:
        number = job.version
        changed = store.commit(
            Change(
                job=replace(job, state=str(number + 1)),
                attempts=[Attempt(job_id=job.id, number=number, tag=str(number), created_at=0.0)],
                intents=[Intent(key=str(number), kind="submit", state="pending", created_at=0.0, job_id=job.id)],
                events=[Event(at=0.0, kind="", message=str(number), job_id=job.id)],
            )
        )
        assert changed is not None
        os.write(acknowledge, b".")
        job = changed


def kill_one(url: str, chance: random.Random, *, opening: bool) -> int:
    """Start a writer, kill it while it opens the database or commits; return how many commits it had acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            write_for_ever(url, writing)
        finally:
            os._exit(1)
    os.close(writing)
    awaited = 0 if opening else chance.randint(1, 5)
    seen = b"".join(os.read(reading, 1) for _ in range(awaited))
    time.sleep(chance.uniform(0, OPENING if opening else COMMITTING))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    with open(reading, "rb") as pipe:
        return len(seen + pipe.read())


def check(url: str) -> int:
    """Every commit is whole; returns how many there are."""
    if url.startswith("sqlite"):
        engine = create_engine(url)
        with engine.connect() as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
        engine.dispose()
    store = open_store(url)
    try:
        jobs = store.jobs()
        assert len(jobs) <= 1
        count = jobs[0].version - 1 if jobs else 0
        expected = [str(number) for number in range(1, count + 1)]
        assert not jobs or jobs[0].state == str(count + 1)
        assert [event.message for event in store.events(limit=None)] == expected
        assert [intent.key for intent in store.intents()] == expected
        assert [attempt.tag for attempt in store.attempts(1)] == expected
        return count
    finally:
        store.close()


def kill(url: str, times: int) -> None:
    """Two of three kills fall into the life of one database, the third into the first moments of a new one."""
    kept = found = 0
    for seed in range(times):
        opening = seed % 3 == 2
        where = f"{url}.{seed}" if opening and url.startswith("sqlite") else url
        before = kept if where == url else 0
        acknowledged = kill_one(where, random.Random(seed), opening=opening)
        after = check(where)
        assert after in (before + acknowledged, before + acknowledged + 1), (seed, before, acknowledged, after)
        found += after - before
        kept = after if where == url else kept
    print(times, found)


def compete(url: str, times: int) -> None:
    store = open_store(url)
    while times:
        job = store.job(1)
        assert job is not None
        number = job.attempt + 1
        try:
            store.commit(
                Change(job=replace(job, attempt=number), events=[Event(at=0.0, kind="", message=str(number), job_id=1)])
            )
        except Conflict:
            continue
        times -= 1
    store.close()


def open_at_once(url: str, times: int) -> None:
    waiting, start = os.pipe()
    children = []
    for _ in range(times):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(start)
            os.read(waiting, 1)
            open_store(url).close()
            return
    os.close(start)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * times


if __name__ == "__main__":
    _, verb, where, count = sys.argv
    {"kill": kill, "compete": compete, "open": open_at_once}[verb](where, int(count))
