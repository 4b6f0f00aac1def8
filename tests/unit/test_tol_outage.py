"""A database that fails for long is told of once, and once more when it works again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tol_sites import started
from tol_world import SimWorld
from transom_sql.store import StoreError

from transomd.tol.outage import StoreOutage
from transomd.words import JobState

FULL = "the disk is full"


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        yield made


def fails(name: str, cause: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise StoreError(f"{name} in db.sqlite: {cause}", hint="df -h")

    return call


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    kept = [r for r in caplog.records if r.name == "transom.loop" and r.levelno >= logging.WARNING]
    assert not any(record.exc_info for record in kept), "no traceback"
    return [record.getMessage() for record in kept]


async def test_a_disk_that_is_full_for_a_minute_is_told_once(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await world.submit({"nodes": 1, "spares": 0})
    await world.until(lambda: world.state() is JobState.RUNNING)
    with monkeypatch.context() as patched:
        for name in ("commit", "retry_intent", "finish_intent"):
            patched.setattr(world.store, name, fails(name, FULL))
        await world.run(60)
    await world.end()
    assert told(caplog) == [
        f"commit in db.sqlite: {FULL} (next: df -h); nothing is decided until it works, and this is not said again",
        "the database works again",
    ]
    assert world.state() is JobState.COMPLETED


async def test_a_cycle_that_the_database_fails_is_no_fault_of_the_loops(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.operator is not None
    operator, cycles = world.operator, []

    async def step() -> str:
        cycles.append(1)
        await operator.books.db(operator.books.store.intents, states=["pending"])
        return ""

    async def rest() -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(operator, "step", step)
    monkeypatch.setattr(operator, "_rest", rest)
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "intents", fails("intents", FULL))
        running = asyncio.create_task(operator.run())
        while len(cycles) < 5:
            await asyncio.sleep(0)
    while len(cycles) < 10:
        await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert len(told(caplog)) == 2


def test_another_cause_is_told_and_the_same_one_of_another_call_is_not(caplog: pytest.LogCaptureFixture) -> None:
    outage = StoreOutage()
    for call in ("commit", "jobs", "commit"):
        outage.failed(call, StoreError(f"{call} in db: {FULL}"))
    outage.failed("jobs", StoreError("jobs in db: it is gone"))
    outage.worked("nodes")
    assert [text.partition(";")[0] for text in told(caplog)] == [f"commit in db: {FULL}", "jobs in db: it is gone"]
    outage.worked("commit")
    outage.worked("jobs")
    assert told(caplog)[2:] == ["the database works again"]
