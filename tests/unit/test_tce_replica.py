"""The peer copy between real keepers on loopback ports: what reached ``replica`` outlives the node that saved it."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import own_place, stop, wait_for
from tce_nodes import Node, nodes, on, pair
from tce_wire import Wire
from xxhash import xxh3_64_intdigest

from transomd.proof import NotOfThisJob
from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.files import digest
from transomd.tce.memory.arena import Arena, staged
from transomd.tce.memory.slots import STAGED, WRITING, SlotState
from transomd.tce.memory.table import Place, Table, encode
from transomd.tce.replicate.copies import Copy
from transomd.tce.replicate.peer import CHUNK, TIMEOUT_S, Peer
from transomd.tce.replicate.post import offer_of, quarantine_if_damaged

NEVER = 1_000_000
"""Storage gets no step."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    return {"model": {str(i): torch.full((size,), float(step + i)) for i in range(4)}, "mine": {"step": step}}


def loaded(directory: Path, source: str = "", **settings: Any) -> int | None:
    """The newest step, all of whose values were right, and where it came from."""
    engine = CheckpointEngine(directory, **{"rank": 0, "world_size": 1, "epoch": 2, **settings})
    state: dict[str, Any] = {}
    step = engine.load(state)
    if step is not None:
        for index in range(4):
            assert bool(state["model"][str(index)].eq(step + index).all())
        assert state["mine"] == {"step": step}
        assert source in engine.resumed_from
    engine.close(0)
    return step


def saver(directory: Path, **settings: Any) -> CheckpointEngine:
    told = {"rank": 0, "world_size": 1, "epoch": 1, "storage_every": NEVER, **settings}
    return CheckpointEngine(directory, **told)


def test_a_step_that_reached_replica_outlives_its_node(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        for step in (1, 2, 3):
            engine.save(step, state_of(step)).wait("replica", timeout=60)
        assert n2.copies() == [3, 2]
        status = n1.status()
        assert status["ranks"][0]["stages"]["replica"]["step"] == 3
        assert (status["partner"], status["replica_problem"]) == ("n2", "")
        n1.kill()
        pair([n2, n3], {"n2": "n3"}, epoch=2)
        on(n3)
        assert loaded(directory, "copy of another node") == 3
        assert n3.copies() == [3]
        # By now it may be in storage, too.
        on(n2)
        assert loaded(directory) == 3
        engine.close(0)


def test_both_holders_lost_storage_is_left(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory, storage_every=2)
        engine.save(2, state_of(2)).wait("storage", timeout=60)
        handle = engine.save(3, state_of(3))
        handle.wait("replica", timeout=60)
        with pytest.raises(CheckpointError, match="storage gets the steps that 2 divides"):
            handle.wait("storage")
        n1.kill()
        n2.kill()
        pair([n3], {}, epoch=2)
        on(n3)
        assert loaded(directory, "storage") == 2
        engine.close(0)


def test_without_a_partner_the_handle_says_so(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,):
        on(n1)
        with saver(directory) as engine:
            with pytest.raises(CheckpointError, match="has not told of a keeper on another node"):
                engine.save(1, state_of(1)).wait("replica")
            pair([n1], {})
            assert not engine.save(2, state_of(2)).done("replica")
            with pytest.raises(CheckpointError, match="no other node of this launch"):
                engine.save(3, state_of(3)).wait("replica")


def test_a_program_without_agents_is_told_that_there_is_no_replica(directory: Path) -> None:
    with CheckpointEngine(directory) as engine, pytest.raises(CheckpointError, match="not started by transom"):
        engine.save(1, state_of(1)).wait("replica")


def test_a_wrong_token_is_refused_on_either_side(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        n2.kill()
        n2.token.write_text("of another job")
        n2.start()
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        handle = engine.save(1, state_of(1))
        assert wait_for(lambda: "does not hold this job's token" in n1.status()["replica_problem"])
        assert not handle.done("replica")
        assert n2.copies() == []
        with pytest.raises(NotOfThisJob):
            Peer.dial(("127.0.0.1", n1.port), "guessed")
        engine.close(0)


def test_a_side_that_hung_up_is_known_and_one_that_is_silent_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Peer(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
        assert not peer.gone
        other.close()
        assert wait_for(lambda: peer.gone)
        peer.close()


def test_what_strangers_send_is_bounded_and_harms_nobody(directory: Path) -> None:
    chance = random.Random(4)
    with nodes(directory.parent, 2) as (n1, n2):
        for size in (4, 5, 100, 4000):
            with socket.create_connection(("127.0.0.1", n2.port)) as sock:
                sock.sendall(chance.randbytes(size))
        with socket.create_connection(("127.0.0.1", n2.port)) as sock:
            sock.sendall(b"\xff\xff\xff\x7f")
            sock.settimeout(10)
            assert sock.recv(1) == b""
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        with saver(directory) as engine:
            engine.save(1, state_of(1)).wait("replica", timeout=60)


def test_a_receiver_without_room_says_so_with_numbers_and_the_program_goes_on(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,):
        n2 = Node.__new__(Node)
        (directory.parent / "n2.token").write_text(n1.token.read_text())
        n2.__init__(directory.parent, "n2", "64K")  # type: ignore[misc]
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        handle = engine.save(1, state_of(1, 50_000))
        assert wait_for(lambda: "limit 64.0 KiB" in n1.status()["replica_problem"])
        assert not handle.done("replica")
        assert engine.save(2, state_of(2, 50_000)).done("memory")
        engine.close(0)
        n2.kill()
        for left in (n2.socket, n2.socket.with_suffix(".lock")):
            left.unlink(missing_ok=True)


def test_a_holder_that_was_started_anew_gets_the_copy_again(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        with saver(directory) as engine:
            engine.save(1, state_of(1)).wait("replica", timeout=60)
            n2.kill()
            n2.start()
            assert wait_for(lambda: n2.copies() == [1])


def arena_of(node: Node, rank: int, copy: bool) -> Arena:
    """The memory of a keeper, as the test maps it."""
    name = f"transom:{'copy' if copy else 'rank'}-{rank}"
    folder = Path(f"/proc/{node.process.pid}/fd")
    path, *_ = [link for link in folder.iterdir() if os.readlink(link).startswith(f"/memfd:{name}")]
    return Arena(os.open(path, os.O_RDWR))


def flip(node: Node, rank: int, copy: bool, at: float = 0.5) -> None:
    """Change one byte in the middle of the newest slot's data, in the memory of a keeper."""
    arena = arena_of(node, rank, copy)
    _, slot, state = next(staged([arena]))
    arena.image(slot)[int(at * state.table_offset)] ^= 0xFF
    arena.close()


def test_a_step_that_was_refused_is_offered_again_without_another_save(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        for step in (1, 2):
            engine.save(step, state_of(step)).wait("replica", timeout=60)
        held = arena_of(n2, 0, copy=True)
        *_, (_, slot, state) = staged([held])
        assert held.acquire(slot, state.seq)
        handle = engine.save(3, state_of(3))
        assert wait_for(lambda: "being read" in n1.status()["replica_problem"])
        assert n2.copies() == [2, 1]
        held.release(slot)
        handle.wait("replica", timeout=60)
        assert n2.copies() == [3, 2]
        assert n1.status()["replica_problem"] == ""
        held.close()
        engine.close(0)


def test_a_damaged_copy_is_found_by_its_holder_also_where_the_other_side_hangs_up(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        for step in (1, 2):
            engine.save(step, state_of(step)).wait("replica", timeout=60)
        flip(n2, 0, copy=True)
        peer = Peer.dial(("127.0.0.1", n2.port), n2.token.read_text())
        peer.send({"t": "pull", "directory": os.path.realpath(directory), "rank": 0, "epoch": 1, "step": 2})
        assert peer.receive()["t"] == "offer"
        peer.close()
        assert wait_for(lambda: n2.copies() == [1])
        engine.close(0)


@pytest.mark.parametrize("marked", [False, True], ids=["staged", "marked by a program that gives way"])
def test_what_was_not_digested_yet_is_handed_out_with_digests_and_is_no_damage(marked: bool) -> None:
    arena = Arena.create(2, 1 << 16, "mine")
    place = Place("rank-00000", (0,), ("mine",), (), 0, 0, 0, 100, True)
    content = encode(Table(0, 1, ("rank-00000",), (place,)))
    arena.image(0)[100 : 100 + len(content)] = content
    arena.set_state(0, SlotState(STAGED, 1, 1, 1, 100, len(content), xxh3_64_intdigest(content)))
    copy = Copy("somewhere", 0)
    copy.arenas = [arena]
    (entry,) = copy.staged()
    if marked:
        arena.set_state(0, SlotState(WRITING, 1, 2, 1))
    assert offer_of("somewhere", copy, entry).digests == {"rank-00000": [[digest(bytes(100))]]}
    assert not quarantine_if_damaged(copy, entry)
    arena.set_state(0, entry[2])
    assert copy.staged() == [entry]
    arena.close()


@pytest.mark.parametrize(
    ("storage_every", "damaged", "lost", "here", "found"),
    [
        pytest.param(1, "n2", "n1", "n3", (2, "storage"), id="in-the-copy-of-a-step-that-is-stored"),
        pytest.param(NEVER, "n2", "n1", "n3", (1, "copy of another node"), id="in-the-copy"),
        pytest.param(NEVER, "n2", "n1", "n2", (1, "copy of another node"), id="in-the-copy-on-this-very-node"),
        pytest.param(NEVER, "n1", "", "n1", (2, "copy of another node"), id="in-own-memory"),
    ],
)
def test_a_flipped_bit_in_memory_is_found_and_the_next_best_used(
    directory: Path, storage_every: int, damaged: str, lost: str, here: str, found: tuple[int, str]
) -> None:
    """Of steps 1 and 2, which n1 saved and n2 has copies of, a bit of the newest is flipped."""
    with nodes(directory.parent, 3) as all_:
        there = {node.name: node for node in all_}
        pair(all_, {"n1": "n2"})
        on(there["n1"])
        engine = saver(directory, storage_every=storage_every)
        for step in (1, 2):
            handle = engine.save(step, state_of(step))
            handle.wait("replica", timeout=60)
            if storage_every == 1:
                handle.wait("storage", timeout=60)
        flip(there[damaged], 0, copy=damaged == "n2")
        if lost:
            there.pop(lost).kill()
        pair(list(there.values()), {}, epoch=2)
        on(there[here])
        assert loaded(directory, found[1]) == found[0]
        if damaged == "n2":
            assert wait_for(lambda: "damaged in memory" in there[damaged].log.read_text())
        engine.close(0)


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_kill_at_any_moment_leaves_a_whole_copy_or_the_one_before(directory: Path, victim: str) -> None:
    """Seeded: the newest step that was acknowledged is there, whoever is killed in the middle of the next one."""
    chance = random.Random(20261130)
    with nodes(directory.parent, 3) as (n1, n2, n3):
        found = {"n1": n1, "n2": n2, "n3": n3}
        step = 0
        engine: CheckpointEngine | None = None
        for round_ in range(1, 7):
            pair([n1, n2, n3], {"n1": "n2"}, epoch=2 * round_)
            on(n1)
            engine = saver(directory, epoch=2 * round_)
            step += 1
            handle = engine.save(step, state_of(step, 400_000))
            handle.wait("replica", timeout=60)
            step += 1
            engine.save(step, state_of(step, 400_000))
            time.sleep(chance.uniform(0, 0.03))
            (n1 if victim == "sender" else n2).kill()
            on(n3 if victim == "sender" else n1)
            engine.close(0)
            alive = [node for node in found.values() if node.process.poll() is None]
            pair(alive, {}, epoch=2 * round_ + 1)
            at = loaded(directory, epoch=2 * round_ + 1)
            logs = "".join(node.log.read_text() for node in found.values())
            assert at is not None, logs
            assert at >= step - 1, logs
            (n1 if victim == "sender" else n2).start()
        del engine


def test_saves_never_wait_for_a_partner_that_hangs(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, 400_000)).wait("replica", timeout=60)
        stop(n2.process.pid)
        began = time.monotonic()
        for step in range(2, 12):
            assert engine.save(step, state_of(step, 400_000)).done("memory")
        assert time.monotonic() - began < 5 * TIMEOUT_S, "ten that wait would take twice as long"
        os.kill(n2.process.pid, signal.SIGCONT)
        engine.save(30, state_of(30, 400_000)).wait("replica", timeout=60)
        assert engine.skipped == 0
        engine.close(0)


def test_a_transfer_that_hangs_gives_way_to_the_saves(directory: Path) -> None:
    """There is room for two slots only: one is the newest, and the program needs the other."""
    with nodes(directory.parent, 2, "16M") as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1, 400_000)).wait("replica", timeout=60)
        stop(n2.process.pid)
        assert engine.save(2, state_of(2, 400_000)).done("memory")
        assert wait_for(lambda: in_use(n1, 2))
        assert engine.save(3, state_of(3, 400_000)).done("memory")
        assert wait_for(lambda: "wanted for something else" in n1.status()["replica_problem"])
        assert wait_for(lambda: not in_use(n1, 2))
        assert engine.save(4, state_of(4, 400_000)).done("memory")
        os.kill(n2.process.pid, signal.SIGCONT)
        engine.save(9, state_of(9, 400_000)).wait("replica", timeout=60)
        assert engine.skipped == 0
        engine.close(0)


def in_use(node: Node, step: int) -> bool:
    """Whether a keeper reads what rank 0 has staged of a step."""
    arena = arena_of(node, 0, copy=False)
    found = any(state.step == step and arena.used(slot) for slot, state in enumerate(arena.states()))
    arena.close()
    return found


def test_what_kept_copies_from_a_lost_partner_is_not_said_of_the_next(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,), socket.create_server(("127.0.0.1", 0)) as n2:
        keepers = {"n2": [*n2.getsockname(), []]}
        n1.ask(op="peers", epoch=1, me="n1", partner="n2", keepers=keepers)
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1))
        peer = Peer(n2.accept()[0])
        peer.welcome(n1.token.read_text())
        assert peer.receive()["t"] == "offer"
        pair([n1], {}, epoch=2)
        with pytest.raises(ConnectionError, match="closed the connection"):
            peer.receive()
        assert n1.status()["replica_problem"] == ""
        peer.close()
        engine.close(0)


def test_a_new_partner_gets_the_copy_though_the_old_one_still_owes_an_answer(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory)
        engine.save(1, state_of(1)).wait("replica", timeout=60)
        stop(n2.process.pid)
        handle = engine.save(2, state_of(2))
        assert wait_for(lambda: in_use(n1, 2))
        pair([n1, n3], {"n1": "n3"}, epoch=2)
        handle.wait("replica", timeout=60)
        assert n3.copies()[0] == 2
        os.kill(n2.process.pid, signal.SIGCONT)
        engine.close(0)


def test_a_step_that_the_program_waits_for_is_copied_whatever_was_agreed_on(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        n1.ask(op="keep", steps=[], aim=[1, 2])
        on(n1)
        engine = saver(directory)
        engine.save(2, state_of(2)).wait("replica", timeout=60)
        engine.save(3, state_of(3)).wait("replica", timeout=60)
        assert n2.copies() == [3, 2]
        engine.close(0)


def test_what_every_node_holds_alike_is_not_sent_again(directory: Path) -> None:
    """Two data-parallel ranks on two nodes, and a tensor of each rank's own."""
    with nodes(directory.parent, 2) as (n1, n2):
        wire = Wire(n2.port, cuts=[])
        n2.port = wire.port
        pair([n1, n2], {"n1": "n2", "n2": "n1"})
        engines = []
        for rank, node in enumerate((n1, n2)):
            on(node)
            engines.append(saver(directory, rank=rank, world_size=2, replicated=["model"]))
            engines[-1].save(1, {**state_of(1, 1_000_000), "own": torch.full((7,), float(rank))})
        state = state_of(2, 1_000_000)
        for handle in [engine.save(2, {**state, "own": torch.full((7,), float(engine.rank))}) for engine in engines]:
            handle.wait("replica", timeout=60)
        assert n2.copies(0)[0] == 2
        assert n1.copies(1)[0] == 2
        wire.close()
        # Two steps of 16 MB; of each, the chunk in which the rank's own part ends and the common one begins.
        assert sum(wire.carried) < 2.1 * CHUNK
        for engine in engines:
            engine.close(0)
