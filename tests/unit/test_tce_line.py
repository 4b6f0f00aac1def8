"""A program's line to its keeper where that stands still, or says something else; and what it hands out over it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import arena_of, keeper_of, newest_slot, own_place, stop, wait_for

from transomd.tce import CheckpointEngine
from transomd.tce.memory.arena import mapped
from transomd.tce.memory.link import _ENOUGH, Link, call
from transomd.tce.memory.recall import table_of
from transomd.tce.memory.slots import WRITING
from transomd.tce.memory.wire import Line


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    lines = []
    for sock in socket.socketpair():
        sock.setblocking(False)
        lines.append(Line(sock))
    yield lines[0], lines[1]
    for line in lines:
        line.close()


def state_of(step: int, size: int = 100) -> dict[str, Any]:
    return {"x": torch.full((size,), float(step))}


def test_a_keeper_that_stood_still_for_thousands_of_saves_goes_on_with_the_newest(directory: Path) -> None:
    """It is told of more of them than its line holds."""
    last = 2000
    engine = CheckpointEngine(directory, storage_every=last)
    engine.save(0, state_of(0)).wait(timeout=60)
    pid = keeper_of(directory)
    stop(pid)
    try:
        tier = engine._memory
        assert tier is not None
        link = tier._lease._link
        assert link is not None
        link._line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        for step in range(1, last + 1):
            handle = engine.save(step, state_of(step))
            assert handle.done("memory")
        assert link._line.waiting >= _ENOUGH, "it all went into the line"
    finally:
        os.kill(pid, signal.SIGCONT)
    handle.wait(timeout=60)
    larger = engine.save(last + 1, state_of(1, 100_000))
    assert larger.done("memory"), tier.reason
    engine.close()
    assert engine.skipped == 0


def test_of_much_that_was_staged_the_newest_is_told_and_of_all_else_everything_in_its_turn(
    ends: tuple[Line, Line],
) -> None:
    link, keeper = Link(ends[0]), ends[1]
    for step in range(20_000):
        link.tell("staged", step=step)
    link.tell("resumed", step=7)
    link.tell("staged", step=20_000)
    assert ends[0].waiting < 2 * _ENOUGH
    heard: list[Any] = []

    def came() -> bool:
        link.listen()
        heard.extend((message["op"], message["step"]) for message in keeper.receive())
        return heard[-1:] == [("staged", 20_000)]

    assert wait_for(came), heard[-3:]
    assert heard[-3:] == [("staged", 19_999), ("resumed", 7), ("staged", 20_000)]
    assert [step for _, step in heard[:100]] == list(range(100))
    assert len(heard) < 20_000


class Chattering(Link):
    """A line over which something else comes whenever an answer is waited for."""

    def __init__(self, line: Line, keeper: Line) -> None:
        super().__init__(line)
        self.keeper = keeper
        self.patience = time.monotonic() + 10

    def wait(self, seconds: float) -> bool:
        assert time.monotonic() < self.patience, "it is waited for without end"
        self.keeper.queue({"t": "partner", "none": ""})
        self.keeper.flush()
        return super().wait(seconds)


def test_an_answer_is_overdue_also_where_other_news_come_all_the_time(ends: tuple[Line, Line]) -> None:
    link = Chattering(*ends)
    with pytest.raises(TimeoutError, match="does not answer 'arena'"):
        link.ask("arena", timeout_s=0.1)


def test_what_is_held_can_be_loaded_while_the_program_sees_that_it_cannot_have_the_slot(directory: Path) -> None:
    """It says WRITING there before it looks."""
    engine = CheckpointEngine(directory, epoch=1)
    engine.save(1, state_of(1)).wait(timeout=60)
    link = call(directory, 0, 1, start=False)
    assert link is not None
    answer, descriptors = link.ask("hold", epoch=1, step=1)
    (told,), (held,) = answer["slots"], mapped(descriptors)
    arena = arena_of(engine._memory)
    slot = newest_slot(arena)
    before = arena.state(slot)
    arena.set_state(slot, replace(before, state=WRITING, table_bytes=0))
    table = table_of(told, held)
    arena.set_state(slot, before)
    assert table == table_of({"slot": slot}, held), "as a keeper of an earlier version tells it"
    held.close()
    link.close()
    engine.close()
