"""Copies of large steps over several TCP streams, between real keepers, and over cables that are slow or cut."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import own_place
from tce_nodes import Node, nodes, on, pair
from tce_wire import Wire

from transomd.tce import CheckpointEngine
from transomd.tce.replicate.copies import Copies
from transomd.tce.replicate.peer import CHUNK, Peer
from transomd.tce.replicate.post import Post
from transomd.tce.replicate.streams import STREAMS, WIDE, Streams

NEVER = 1 << 62
SIZE = 12 * CHUNK
SLOW = 60e6
"""Bytes a second of a cable: slow enough for every stream to get its part."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place(killed=True) as folder:
        yield folder


def saver(directory: Path) -> CheckpointEngine:
    return CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=NEVER)


def state_of(step: int, size: int = SIZE) -> dict[str, Any]:
    return {"x": torch.arange(size // 8) * step}


def through(node: Node, cuts: list[int]) -> Wire:
    """From now on others reach this keeper by a cable."""
    wire = Wire(node.port, cuts, SLOW)
    node.port = wire.port
    return wire


def test_a_large_step_goes_over_several_streams_there_and_back(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        wire = through(n2, [])
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1)).wait("replica", timeout=120)
        assert len(wire.carried) == STREAMS
        assert sum(count > CHUNK for count in wire.carried) > 1
        assert sum(wire.carried) < SIZE + CHUNK
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        on(n3)
        loader = CheckpointEngine(directory, rank=0, world_size=1, epoch=2)
        state: dict[str, Any] = {}
        assert loader.load(state) == 1
        assert state["x"].equal(state_of(1)["x"])
        assert sum(count > CHUNK for count in wire.brought) > 1
        wire.close()
        loader.close(0)
        engine.close(0)


@pytest.mark.parametrize("cut", [0, 1], ids=["the one for words", "another one"])
def test_a_cut_stream_ends_all_and_the_copy_goes_on_where_it_was_cut(directory: Path, cut: int) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        far = 1 << 60
        wire = through(n2, [*(cut * [far]), CHUNK + CHUNK // 2, *((STREAMS - 1) * [far]), CHUNK // 2])
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1)).wait("replica", timeout=120)
        assert n2.copies() == [1]
        assert len(wire.carried) == 3 * STREAMS
        # Of each cut at most the chunks that were on their way go again.
        assert sum(wire.carried) < SIZE + 2 * 2 * STREAMS * CHUNK
        wire.close()
        engine.close(0)


@pytest.mark.parametrize("opened", [1, 3])
def test_streams_that_cannot_be_opened_are_done_without_and_told_once(directory: Path, opened: int) -> None:
    far = 1 << 60
    with nodes(directory.parent, 3) as (n1, n2, n3):
        wire = through(n2, [*(opened * [far]), 0])
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        for step in (1, 2):
            engine.save(step, state_of(step, WIDE)).wait("replica", timeout=120)
        if not had_to_call_anew(n1):
            assert len(wire.carried) == opened + 1
            assert n1.log.read_text().count(f"only {opened} of {STREAMS} streams to") == 1
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        on(n3)
        wire.cuts += [far, far, *(opened * [far]), 0]  # it is asked twice what it holds
        loader = CheckpointEngine(directory, rank=0, world_size=1, epoch=2)
        assert loader.load({}) == 2
        assert f"only {opened} of {STREAMS} streams to" in n3.log.read_text()
        wire.close()
        loader.close(0)
        engine.close(0)


def had_to_call_anew(node: Node) -> bool:
    """Whether its partner was silent for too long, as it may be on a machine that has much else to do."""
    return re.search("copies .*do not reach", node.log.read_text()) is not None


class Earlier(Post):
    """A keeper of a version that knows of one stream only."""

    def _answer(self, streams: Streams, message: dict[str, Any]) -> None:
        if message["t"] in ("lead", "join"):
            raise ValueError(message["t"])
        super()._answer(streams, message)


def test_a_keeper_of_an_earlier_version_takes_a_large_step_over_one_stream_and_hands_it_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(peer: Peer, message: dict[str, Any]) -> None:
        content = json.dumps({name: each for name, each in message.items() if name != "wide"}).encode()
        peer._send_all(memoryview(len(content).to_bytes(4, "little") + content))

    monkeypatch.setattr(Peer, "send", send)
    with nodes(directory.parent, 2) as (n1, n3):
        copies = Copies(lambda size: "")
        earlier = Earlier(n1.token.read_text(), 0, lambda _: list(copies.all()), list, copies)
        keepers = {"n2": ["127.0.0.1", earlier.port, [0]]}
        n1.ask(op="peers", epoch=1, me="n1", partner="n2", keepers=keepers)
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, WIDE)).wait("replica", timeout=120)
        n1.kill()
        n3.ask(op="peers", epoch=2, me="n3", partner=None, keepers=keepers)
        on(n3)
        loader = CheckpointEngine(directory, rank=0, world_size=1, epoch=2)
        assert loader.load({}) == 1
        for node in (n1, n3):
            told = node.log.read_text().count("its keeper is of an earlier version")
            assert told == 1 or (told > 1 and had_to_call_anew(node))
        loader.close(0)
        engine.close(0)
        earlier._listener.close()


class Forgetful(Post):
    """A keeper that counts on a stream, the next one where it ``forgets``, and does not tell the side that called."""

    forgets = False

    def _answer(self, streams: Streams, message: dict[str, Any]) -> None:
        if message["t"] == "join" and self.forgets:
            self.forgets = False
            streams.first.close()
        super()._answer(streams, message)


def test_a_stream_on_which_the_other_side_alone_counts_costs_no_step(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n3):
        copies = Copies(lambda size: "")
        forgetful = Forgetful(n1.token.read_text(), 0, lambda _: list(copies.all()), list, copies)
        forgetful.forgets = True
        keepers = {"n2": ["127.0.0.1", forgetful.port, [0]]}
        n1.ask(op="peers", epoch=1, me="n1", partner="n2", keepers=keepers)
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, WIDE)).wait("replica", timeout=120)
        assert not forgetful.forgets
        n1.kill()
        forgetful.forgets = True
        n3.ask(op="peers", epoch=2, me="n3", partner=None, keepers=keepers)
        on(n3)
        loader = CheckpointEngine(directory, rank=0, world_size=1, epoch=2)
        state: dict[str, Any] = {}
        assert loader.load(state) == 1
        assert state["x"].equal(state_of(1, WIDE)["x"])
        assert "step 1 of rank 0 now comes over one stream" in n3.log.read_text()
        loader.close(0)
        engine.close(0)
        forgetful._listener.close()


def test_no_save_waits_for_a_partner_that_hangs_before_the_other_streams_are_open(directory: Path) -> None:
    """There is room for two slots only: one is the newest, and the program needs the other."""
    with nodes(directory.parent, 1, "80M") as (n1,), socket.create_server(("127.0.0.1", 0)) as n2:
        n2.settimeout(60)
        keepers = {"n2": [*n2.getsockname(), []]}
        n1.ask(op="peers", epoch=1, me="n1", partner="n2", keepers=keepers)
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, WIDE))
        called = Peer(n2.accept()[0])
        called.welcome(n1.token.read_text())
        assert called.receive() == {"t": "lead"}
        for step in (2, 3):
            assert engine.save(step, state_of(step, WIDE)).done("memory")
        assert engine.skipped == 0
        called.close()
        engine.close(0)


@pytest.mark.parametrize(("size", "rate"), [(WIDE // 2, ""), (WIDE, "500M")], ids=["small", "capped"])
def test_one_stream_is_enough_for_a_small_step_and_where_the_rate_is_capped(
    directory: Path, monkeypatch: pytest.MonkeyPatch, size: int, rate: str
) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_REPLICA_RATE", rate)
    with nodes(directory.parent, 2) as (n1, n2):
        wire = through(n2, [])
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, size)).wait("replica", timeout=120)
        assert len(wire.carried) == 1
        wire.close()
        engine.close(0)


def test_a_stream_joins_only_what_was_opened_by_who_knows_its_key(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,):
        token = n1.token.read_text()

        def call() -> Peer:
            return Peer.dial(("127.0.0.1", n1.port), token)

        streams = Streams(call())
        streams.lead()
        for _ in range(2):
            streams.widen(call)
        assert streams.each(lambda peer: peer.key) == list(dict.fromkeys(streams.each(lambda peer: peer.key)))
        for key in (streams.first.key, "no such"):
            stranger = call()
            stranger.send({"t": "join", "key": key})
            with pytest.raises(ConnectionError, match="closed the connection"):
                stranger.receive()
            stranger.close()
        side = Streams(call())
        streams.close()
        side.close()
