"""What is in memory alone when the program ends: it comes to storage, also where its keeper was lost just before."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import keeper_of, keepers, own_place, stop, wait_for

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.memory import lease, tier
from transomd.tce.memory.link import Link

NEVER = 1_000_000
"""Storage gets no step while the program is there."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place(killed=True) as folder:
        yield folder


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((5000,), float(step))}


def engine_of(directory: Path, epoch: int = 1, every: int = 1) -> CheckpointEngine:
    return CheckpointEngine(directory, rank=0, world_size=1, epoch=epoch, storage_every=every)


def stored(directory: Path) -> list[int]:
    return [found.step for found in list_checkpoints(directory) if found.complete]


def lose_keeper(directory: Path) -> None:
    """Kill it, and wait until none of its threads holds its lines open any more."""
    pid = keeper_of(directory)
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: pid not in keepers(directory.parent) and len(threads(pid)) <= 1, 60)


def threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def test_close_waits_for_the_newest_step_too_whatever_the_schedule_is(directory: Path) -> None:
    engine = engine_of(directory, every=NEVER)
    first, last = (engine.save(step, state_of(step)) for step in (1, 2))
    engine.close(60)
    assert stored(directory) == [2]
    assert last.done("storage")
    with pytest.raises(Exception, match="it stays in memory"):
        first.wait("storage", timeout=0)


def test_what_storage_refuses_at_the_end_is_warned_of_by_close(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(directory, every=NEVER)
    engine.save(1, state_of(1))
    aside = directory.rename(directory.with_name("aside"))
    directory.write_text("this is no directory")
    with caplog.at_level(logging.WARNING, "transom.tce"):
        engine.close(0.5)
    assert "steps 1 are not on the disk after at most 0 s; the keeper goes on" in caplog.text
    directory.unlink()
    aside.rename(directory)
    assert wait_for(lambda: stored(directory) == [1], 60)


def test_a_step_that_storage_has_anyhow_is_not_waited_for(directory: Path) -> None:
    """As with ``auto``, where a rank stores what another one has begun."""
    engine = engine_of(directory, every=NEVER)
    engine.save(1, state_of(1))
    memory = engine._memory
    assert memory is not None
    memory.ledger.hear({"t": "complete", "step": 1, "epoch": 1, "seq": 1})
    memory.ledger.ends()
    assert not memory.ledger.handles
    engine.close(60)


@pytest.mark.parametrize("every", [1, NEVER])
def test_what_a_keeper_that_was_lost_before_the_end_had_not_stored_comes_to_storage(
    directory: Path, every: int
) -> None:
    engine = engine_of(directory, every=every)
    engine.save(1, state_of(1)).wait("memory")
    stop(keeper_of(directory))
    engine.save(2, state_of(2)).wait("memory")
    lose_keeper(directory)
    engine.close(60)
    assert stored(directory)[:1] == [2]


def test_another_keeper_is_waited_for_at_the_end_also_where_it_comes_late(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an agent's, which may be started again only seconds later."""
    monkeypatch.setattr(lease, "AGAIN_S", 0.05)
    engine = engine_of(directory, every=NEVER)
    engine.save(1, state_of(1))
    lose_keeper(directory)
    call, refused = lease.call, iter(range(3))

    def none_there_yet(*args: Any, **told: Any) -> Link | None:
        if next(refused, None) is not None:
            raise OSError("no keeper listens")
        return call(*args, **told)

    monkeypatch.setattr(lease, "call", none_there_yet)
    engine.close(60)
    assert next(refused, None) is None
    assert stored(directory) == [1]


def test_where_no_keeper_is_to_be_had_at_the_end_what_is_lost_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "_KEEPER_S", 0.2)
    engine = engine_of(directory, every=NEVER)
    engine.save(1, state_of(1))
    lose_keeper(directory)

    def none_there(*args: Any, **told: Any) -> None:
        raise OSError("no keeper listens")

    monkeypatch.setattr(lease, "call", none_there)
    with caplog.at_level(logging.WARNING, "transom.tce"):
        engine.close(60)
    assert "steps 1 are not on the disk" in caplog.text
    assert "no keeper is there that could go on, and they end with this program" in caplog.text


def test_a_start_that_was_replaced_takes_no_memory_from_who_replaced_it(directory: Path) -> None:
    engine = engine_of(directory, every=NEVER)
    saved = engine.save(1, state_of(1))
    second = engine_of(directory, epoch=2, every=NEVER)
    second.save(2, state_of(2))
    assert wait_for(lambda: not saved.done("replica") and bool(saved.never.get("replica")), 60)
    memory = engine._memory
    assert memory is not None
    assert wait_for(lambda: not memory.progress(1) and not memory._lease.held, 60)
    lose_keeper(directory)
    engine.close(60)
    assert keepers(directory.parent) == []
    second.close(60)
    assert stored(directory) == [2]


def test_an_exception_in_its_with_ends_the_engine_as_it_ends_a_program(directory: Path) -> None:
    """The next start, which may come at once, finds the memory."""
    engine = engine_of(directory)
    memory = engine._memory

    def fail() -> None:
        with engine:
            engine.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert memory is not None
    assert not memory._leaving
    assert stored(directory) == [1]


def test_who_hears_late_that_the_keeper_was_lost_takes_no_memory_after_close(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a step is about to call another keeper when the program closes its checkpoints."""
    engine = engine_of(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    memory = engine._memory
    assert memory is not None
    lose_keeper(directory)
    at, closed = threading.Event(), threading.Event()
    call = memory._call

    def late(size: int) -> None:
        at.set()
        closed.wait(60)
        call(size)

    monkeypatch.setattr(memory, "_call", late)

    def wait() -> None:
        while not at.is_set():
            memory.progress(1)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert at.wait(60)
    engine.close(60)
    closed.set()
    waiting.join(60)
    assert not memory._lease.connected
    assert keepers(directory.parent) == []
