"""What keeps copies of one rank from the partner keeps no other rank's from it; what that has lost is copied again."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tce_keepers import state_of, stop, wait_for
from tce_nodes import nodes, on, pair

from transomd.tce import CheckpointEngine
from transomd.tce.replicate.copies import Copies
from transomd.tce.replicate.post import Post
from transomd.tce.replicate.streams import Streams

pytest_plugins = ("tce_places",)

NEVER = 1_000_000
"""Storage gets no step."""


def savers(directory: Path) -> list[CheckpointEngine]:
    """Two ranks of one node."""
    told: dict[str, Any] = {"world_size": 2, "epoch": 1, "storage_every": NEVER}
    return [CheckpointEngine(directory, rank=rank, **told) for rank in (0, 1)]


class Picky(Post):
    """A keeper that hangs up on what is offered of these ranks."""

    fails_on: frozenset[int] = frozenset()
    failed = 0

    def _answer(self, streams: Streams, message: dict[str, Any]) -> None:
        if message["t"] == "offer" and message["rank"] in self.fails_on:
            self.failed += 1
            raise ConnectionError("it fails on this rank")
        super()._answer(streams, message)


def test_a_partner_that_fails_on_one_rank_gets_the_copies_of_the_others(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), ExitStack() as engines:
        copies = Copies(lambda size: "")
        picky = Picky(n1.token.read_text(), 0, lambda _: list(copies.all()), list, copies)
        picky.fails_on = frozenset({0})
        keepers = {"n2": ["127.0.0.1", picky.port, []]}
        n1.ask(op="peers", epoch=1, me="n1", partner="n2", keepers=keepers)
        on(n1)
        first, second = savers(directory)
        engines.callback(first.close, 0)
        engines.callback(second.close, 0)
        held_back = first.save(1, state_of(1))
        assert wait_for(lambda: picky.failed > 1)
        for step in (1, 2, 3):
            second.save(step, state_of(step)).wait("replica", timeout=60)
            assert "copies of rank 0 do not reach n2" in n1.status()["replica_problem"]
        assert not held_back.done("replica")
        picky.fails_on = frozenset()
        held_back.wait("replica", timeout=60)
        assert n1.status()["replica_problem"] == ""
        picky._listener.close()


def test_a_holder_that_dies_amid_a_copy_gets_those_of_the_other_ranks_again(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2), ExitStack() as engines:
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        first, second = savers(directory)
        engines.callback(first.close, 0)
        engines.callback(second.close, 0)
        for engine in (first, second):
            engine.save(1, state_of(1)).wait("replica", timeout=60)
        stop(n2.process.pid)
        offered = second.save(2, state_of(2))
        with pytest.raises(TimeoutError):
            offered.wait("replica", timeout=1.0)
        os.kill(n2.process.pid, signal.SIGKILL)
        n2.process.wait()
        assert wait_for(lambda: "refused" in n1.status()["replica_problem"])
        n2.start()
        offered.wait("replica", timeout=60)
        assert wait_for(lambda: n2.copies(0) == [1])
