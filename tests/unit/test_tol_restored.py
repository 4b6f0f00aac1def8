"""A database that was restored from a backup knows less than Slurm and the launchers do, and ends nothing for that."""

from __future__ import annotations

import sqlite3
from typing import Any

from tol_world import SimWorld

from transomd.words import JobState


def driver(world: SimWorld) -> sqlite3.Connection:
    connection: Any = world.store._engine.raw_connection()
    found: sqlite3.Connection = connection.driver_connection
    return found


async def test_a_job_whose_newest_attempt_a_restored_database_does_not_know_trains_on() -> None:
    world = SimWorld()
    world.steps = 120
    await world.start_daemon()
    await world.submit({"spares": 0})
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    backup = sqlite3.connect(":memory:")
    driver(world).backup(backup)
    world.power_loss("n2")
    await world.until(lambda: len(world.store.attempts(1)) == 2, "a second attempt")
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await world.stop_daemon()
    backup.backup(driver(world))
    assert len(world.store.attempts(1)) == 1
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [epoch for _, epoch, _ in world.launched] == [1, 2], world.story()
    assert len(world.slurm.accepted) == 2, world.story()
    assert [attempt.number for attempt in world.store.attempts(1)] == [1, 2]
    await world.close()
