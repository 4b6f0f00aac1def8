"""Copies that a rank waits to load are fetched, whatever else its node is receiving at the moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tce_keepers import own_place
from tce_nodes import Node, nodes, on, pair

from transomd.tce import CheckpointEngine
from transomd.tce.memory.link import call
from transomd.tce.replicate.peer import CHUNK, Peer

NEVER = 1_000_000
"""Storage gets no step."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def pulled(node: Node, directory: Path, step: int) -> tuple[Peer, dict[str, object]]:
    """A connection to a keeper, and what it offers of rank 0."""
    peer = Peer.dial(("127.0.0.1", node.port), node.token.read_text())
    peer.send({"t": "pull", "directory": os.path.realpath(directory), "rank": 0, "epoch": 1, "step": step})
    return peer, peer.receive()


def test_a_copy_that_is_being_received_gives_way_to_the_step_that_is_to_be_loaded(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=NEVER)
        for step in (1, 2):
            engine.save(step, {"x": torch.full((1000,), float(step))}).wait("replica", timeout=60)
        n1.kill()
        source, offer = pulled(n2, directory, 2)
        slow = Peer.dial(("127.0.0.1", n3.port), n3.token.read_text())
        slow.send({**offer, "insist": True})
        assert slow.receive()["t"] == "want"
        # Its pieces never come; a spare takes the place of n1, and is to go on from the step before.
        pair([n2, n3], {}, epoch=2)
        on(n3)
        state: dict[str, torch.Tensor] = {}
        loader = CheckpointEngine(directory, rank=0, world_size=1, epoch=2, resume_step=1)
        assert loader.load(state) == 1
        assert bool(state["x"].eq(1.0).all())
        with pytest.raises(ConnectionError, match="closed the connection"):
            slow.receive()
        slow.close()
        source.close()
        loader.close(0)
        engine.close(0)


def test_ranks_of_a_node_that_lack_the_same_part_all_get_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all ranks hold alike lies once on each node: on n2, the only one that is left, in the slot of rank 3."""
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        engines, handles = [], []
        for rank, local, node in ((0, 0, n1), (1, 1, n1), (2, 2, n1), (3, 0, n2)):
            on(node)
            monkeypatch.setenv("LOCAL_RANK", str(local))
            told = {"rank": rank, "world_size": 4, "epoch": 1, "storage_every": NEVER}
            engines.append(CheckpointEngine(directory, replicated=["shared"], **told))
            state = {"shared": torch.arange(8 * CHUNK // 8), "own": torch.full((9,), float(rank))}
            handles.append(engines[-1].save(1, state))
        for handle in handles[:3]:
            handle.wait("replica", timeout=60)
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        on(n3)
        errors: dict[int, str] = {}

        def fetch(rank: int) -> None:
            link = call(directory, rank, 4, start=False)
            assert link is not None
            answer, _ = link.ask("fetch", timeout_s=60, epoch=1, step=1)
            errors[rank] = answer["error"]
            link.close()

        ranks = [threading.Thread(target=fetch, args=(rank,)) for rank in range(3)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert errors == {0: "", 1: "", 2: ""}
        for engine in engines:
            engine.close(0)
