"""Whoever asks a keeper something that may take long holds up nobody else: no save, no load, no news."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest
from tce_keepers import keeper_of, state_of, stop, wait_for
from tce_nodes import nodes, on

from transomd.tce import CheckpointEngine
from transomd.tce.memory import lease
from transomd.tce.memory.place import own_socket
from transomd.tce.memory.table import Table

pytest_plugins = ("tce_places",)

NEVER = 1_000_000
"""Storage gets no step while the program is there."""


@contextmanager
def mute_keeper(path: Path) -> Iterator[Queue[socket.socket]]:
    """Where a keeper should listen: one that leaves its first caller without an answer, and has nothing for others.

    Yields where the line of the first one will be.
    """
    path.unlink(missing_ok=True)
    first: Queue[socket.socket] = Queue()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                first.put(server.accept()[0])
                while True:
                    other, _ = server.accept()
                    with other, other.makefile("rb") as lines:
                        for line in lines:
                            number = json.loads(line).get("id")
                            told = {"id": number, "steps": [], "staged": [], "owned": False, "error": ""}
                            other.sendall(json.dumps(told).encode() + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield first
        finally:
            path.unlink()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def waits(line: socket.socket) -> bool:
    """Whether who has called still waits for an answer."""
    line.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while content := line.recv(1 << 16):
            del content
        return False
    return not select.select([line], [], [], 0)[0]


def test_no_save_and_no_load_waits_for_the_call_of_who_asks_how_far_a_save_has_come(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "AGAIN_S", 0.0)
    engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1)
    engine.save(1, state_of(1)).wait(timeout=60)
    memory = engine._memory
    assert memory is not None
    pid = keeper_of(directory)
    stop(pid)
    handle = engine.save(2, state_of(2))
    opened = memory.open(3, Table(0, 1, (), ()))
    os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        with mute_keeper(own_socket(directory)) as first:
            waiting = pool.submit(handle.wait, timeout=120)
            line = first.get(timeout=60)
            memory.publish(opened, 3, Table(0, 1, (), ()), None)
            assert waits(line)
            assert engine.save(4, state_of(4)).done()
            assert "another keeper is being called" in engine.memory_reason
            assert waits(line)
            assert engine.load({}) == 4
            assert waits(line)
            assert not waiting.done()
        line.close()
        waiting.result(120)
    engine.save(5, state_of(5)).wait("memory")
    engine.close()


def test_who_asks_how_far_a_save_has_come_takes_no_answer_away_from_a_load(directory: Path) -> None:
    engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=NEVER)
    engine.save(1, state_of(1))
    memory = engine._memory
    assert memory is not None
    recall = memory.recall(abroad=False)
    assert recall is not None
    pid = keeper_of(directory)
    stop(pid)
    with ThreadPoolExecutor(1) as pool:
        problems = pool.submit(recall.problems, 1, 1)
        assert not wait_for(lambda: memory.progress(1) or problems.done(), 0.5)
        os.kill(pid, signal.SIGCONT)
        while not problems.done():  # without a pause: whoever listens first has the answer
            memory.progress(1)
        assert problems.result() == []
    recall.release()
    engine.close()


def test_no_save_waits_for_a_load_that_asks_another_node(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(60)
        n1.ask(op="peers", epoch=1, me="n1", partner=None, keepers={"mute": [*mute.getsockname(), [0]]})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=NEVER)
        engine.save(1, state_of(1))
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(engine.load, {})
            call, _ = mute.accept()
            with call:
                assert engine.save(2, state_of(2)).done("memory")
                assert waits(call)
            assert loading.result(120) in (1, 2)
        engine.close(0)
