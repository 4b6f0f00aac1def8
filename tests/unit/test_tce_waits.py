"""Whoever waits for a stage hears at once when it is known that the step will not get there, and in its time."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import arena_of, keeper_of, newest_slot, state_of, stop, wait_for
from tce_nodes import Node, nodes, on, pair
from test_tce_persister import Rank

from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.memory import tier
from transomd.tce.memory.due import Owner
from transomd.tce.memory.ledger import Ledger
from transomd.tce.memory.slots import WRITING
from transomd.tce.memory.table import Table
from transomd.tce.memory.tier import MemoryTier
from transomd.tce.replicate.post import quarantine_if_damaged
from transomd.tce.schedule import Fixed

pytest_plugins = ("tce_places",)

NEVER = 1_000_000
"""Storage gets no step."""


def saver(directory: Path, **settings: Any) -> CheckpointEngine:
    return CheckpointEngine(directory, **{"rank": 0, "world_size": 1, "epoch": 1, "storage_every": NEVER, **settings})


@contextmanager
def silent(node: Node) -> Iterator[socket.socket]:
    """A partner of the node that takes calls, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        node.ask(op="peers", epoch=1, me=node.name, partner="mute", keepers={"mute": [*server.getsockname(), []]})
        yield server


def test_a_wait_ends_in_its_time_though_another_thread_closes_the_engine(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    pid = keeper_of(directory)
    stop(pid)
    handle = engine.save(2, state_of(2))
    closing = threading.Thread(target=engine.close, args=(60,))
    closing.start()
    try:
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.1)
        assert closing.is_alive()
    finally:
        os.kill(pid, signal.SIGCONT)
        closing.join(90)
    assert handle.done()


def test_a_step_that_is_saved_while_others_are_waited_for_is_waited_for_as_long_as_the_first(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 never writes; what this rank has written is waited for less long than what it has not."""
    waiting, pause = threading.Event(), MemoryTier.pause

    def noted(self: MemoryTier, seconds: float) -> None:
        waiting.set()
        pause(self, seconds)

    engine = CheckpointEngine(directory, rank=0, world_size=2, epoch=1)
    memory = engine._memory
    assert memory is not None
    handle = engine.save(1, state_of(1))
    assert wait_for(lambda: not (handle.done() or memory.ledger.unwritten))
    pid = keeper_of(directory)
    stop(pid)
    monkeypatch.setattr(tier, "_PEERS_S", 0.5)
    monkeypatch.setattr(MemoryTier, "pause", noted)
    closing = threading.Thread(target=engine.close, args=(60,))
    closing.start()
    try:
        assert waiting.wait(30)
        engine.save(2, state_of(2))
        assert not wait_for(lambda: not closing.is_alive(), 1.5)
    finally:
        os.kill(pid, signal.SIGCONT)
        closing.join(90)
    assert not memory.ledger.unwritten
    with CheckpointEngine(directory, rank=1, world_size=2, epoch=1) as other:  # else the keeper waits for it
        for step in (1, 2):
            other.save(step, state_of(step))


def test_a_step_that_newer_saves_took_the_place_of_is_waited_for_no_more(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory)
        first, *_, last = [engine.save(step, state_of(step)) for step in range(1, 8)]
        with pytest.raises(CheckpointError, match="nor will have one: newer saves took its place"):
            first.wait("replica", timeout=120)
        with pytest.raises(TimeoutError):
            last.wait("replica", timeout=0.1)
        engine.close(0)
        with pytest.raises(CheckpointError, match="nothing more is heard of its copy: the program has closed its"):
            last.wait("replica", timeout=0)


def test_a_step_whose_place_a_save_took_that_failed_is_waited_for_no_more(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory)
        first, *_ = [engine.save(step, state_of(step)) for step in range(1, 5)]
        memory = engine._memory
        assert memory is not None
        assert memory.ledger.awaits_copy(1)
        link = memory._lease._link
        assert link is not None
        link.ask("status")  # it has looked at what was staged
        opened = memory.open(5, Table(0, 1, (), ()))
        assert not memory._pool.holds(1, 1)
        memory.drop(opened)
        with pytest.raises(CheckpointError, match="nor will have one: newer saves took its place"):
            first.wait("replica", timeout=60)
        engine.close(0)


def test_a_step_in_memory_that_was_outgrown_and_is_given_back_is_waited_for_no_more(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory, storage_every=1, replica_every=10)
        small = engine.save(10, state_of(10))
        small.wait(timeout=60)
        engine.save(11, {"x": torch.zeros(100_000)}).wait(timeout=60)
        with pytest.raises(CheckpointError, match="nor will have one: newer saves took its place"):
            small.wait("replica", timeout=60)
        engine.close(0)


def test_a_step_whose_slot_a_save_marked_and_gave_back_is_still_waited_for(directory: Path) -> None:
    """The keeper looks at that very moment, and takes it for gone."""
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory)
        handle = engine.save(1, state_of(1))
        memory = engine._memory
        assert memory is not None
        arena = arena_of(memory)
        slot = newest_slot(arena)
        before = arena.state(slot)
        arena.set_state(slot, replace(before, state=WRITING))
        memory._tell_staged()
        link = memory._lease._link
        assert link is not None
        assert wait_for(lambda: link.ask("status") and any(told["t"] == "uncopied" for told in link.news))
        arena.set_state(slot, before)
        with pytest.raises(TimeoutError):
            handle.wait("replica", timeout=0.1)
        engine.close(0)


@pytest.mark.parametrize("where", ["data", "table"])
def test_a_step_that_was_damaged_in_memory_is_waited_for_no_more_and_the_next_one_is_copied(
    directory: Path, where: str
) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        on(n1)
        with silent(n1) as mute:
            engine = saver(directory)
            handle = engine.save(1, state_of(1))
            call, _ = mute.accept()  # its digests are known by now
            arena = arena_of(engine._memory)
            slot = newest_slot(arena)
            state = arena.state(slot)
            arena.image(slot)[state.table_offset + 9 if where == "table" else state.table_offset // 2] ^= 1
            pair([n1, n2], {"n1": "n2"})
            call.close()
        with pytest.raises(CheckpointError, match="nor will have one: it was damaged in memory"):
            handle.wait("replica", timeout=120)
        engine.save(2, state_of(2)).wait("replica", timeout=120)
        assert n2.copies() == [2]
        engine.close(0)


def test_who_was_superseded_by_another_start_waits_for_no_copy(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory)
        handle = engine.save(1, state_of(1))
        later = saver(directory, epoch=2)
        later.save(2, state_of(2))
        with pytest.raises(CheckpointError, match="another start of this program has taken over"):
            handle.wait("replica", timeout=120)
        later.close(0)
        engine.close(0)


def test_a_copy_is_waited_for_no_more_once_the_launcher_has_no_other_node_for_it(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), silent(n1):
        on(n1)
        engine = saver(directory)
        handle = engine.save(1, state_of(1))
        with pytest.raises(TimeoutError):
            handle.wait("replica", timeout=0.1)
        n1.ask(op="peers", epoch=1, me="n1", partner=None, keepers={})
        with pytest.raises(CheckpointError, match="nor will have one: no other node of this launch can hold a copy"):
            handle.wait("replica", timeout=120)
        engine.close(0)


def test_all_saves_of_one_step_are_told_of_it() -> None:
    ledger = Ledger(1, Fixed(1), Fixed(1))
    first, second = SaveHandle(5, lambda: False), SaveHandle(5, lambda: False)
    for seq, handle in enumerate((first, second), start=1):
        ledger.add(handle, seq)
    with pytest.raises(CheckpointError, match="it was saved anew"):
        first.wait("replica", timeout=0)
    ledger.hear({"t": "replicated", "step": 5, "epoch": 1})
    ledger.hear({"t": "complete", "step": 5, "epoch": 1})
    second.wait("replica", timeout=0)
    assert wait_for(lambda: first.done() and second.done())


def test_what_is_told_of_a_save_is_believed_of_no_later_save_of_that_step() -> None:
    ledger = Ledger(1, Fixed(1), Fixed(1))
    first, second, third = (SaveHandle(5, lambda: False) for _ in range(3))
    for seq, handle in enumerate((first, second, third), start=7):
        ledger.add(handle, seq)
    at = {"step": 5, "epoch": 1, "seq": 7}
    for told in ({"t": "replicated"}, {"t": "uncopied", "why": "?"}, {"t": "written"}):
        ledger.hear({**told, **at})
    assert not any((third.replicated, third.never))
    ledger.hear({"t": "failed", "error": "?", "hint": "", **at})
    ledger.skip(5, 6, 8)
    assert [handle.error is None for handle in (first, second, third)] == [False, False, True]
    assert ledger.unwritten == {5}
    for kind in ("replicated", "written", "complete"):
        ledger.hear({"t": kind, **at, "seq": 9})
    third.wait("replica", timeout=0)
    third.wait(timeout=0)
    assert (ledger.unwritten, ledger.handles) == (set(), {})


def test_of_two_saves_of_a_step_the_one_that_is_damaged_alone_is_given_up(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "c")
    rank.take_over(Owner(1, 1, "", 9, every=NEVER, replica_every=3))
    for slot in (0, 1):
        rank.stage(slot, step=3, seq=1 + slot)
    rank.arenas[0].image(0)[5] ^= 1
    assert quarantine_if_damaged(rank, rank.staged()[1])
    assert [state.seq for _, _, state in rank.staged()] == [2]
    assert [told.get("seq") for told in rank.told if told["t"] == "uncopied"] == [1]
    rank.close()


def test_the_copy_of_a_step_is_not_taken_for_one_of_what_was_saved_anew_before_the_program_heard_of_it(
    directory: Path,
) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        memory = engine._memory
        assert memory is not None
        stop(n2.process.pid)
        engine.save(5, state_of(5))
        opened = memory.open(5, Table(0, 1, (), ()))  # it hears no news until this is published
        os.kill(n2.process.pid, signal.SIGCONT)
        assert wait_for(lambda: n1.status()["ranks"][0]["stages"].get("replica"))
        stop(n2.process.pid)
        anew = SaveHandle(5, lambda: memory.progress(5), pause=memory.pause)
        memory.publish(opened, 5, Table(0, 1, (), ()), anew)
        with pytest.raises(TimeoutError):
            anew.wait("replica", timeout=0.1)
        os.kill(n2.process.pid, signal.SIGCONT)
        anew.wait("replica", timeout=120)
        engine.close(0)
