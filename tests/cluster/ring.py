"""A stand-in for a training program, in the standard library: starts in 0.1 s, so that many failures can be tried.

Ranks meet at rank 0 before every step, as in a collective; when a peer is gone they wait for ever, as NCCL does. Every
rank has a state, which each step mixes with all ranks' states; their sum is the step's "loss", printed exactly (as a
hexadecimal float) by every rank. Rank 0 writes all states to the checkpoint folder every few steps, and every start
goes on from there, so that a run with failures prints the very losses of a run without (:func:`losses`).
``--raise-at N`` raises an exception on every rank at step N; ``--patience S`` has ranks that wait for a peer for so
long once the first step begins, or lose it, raise one in words of the program's own. ``--then N`` ends a start that
goes on from a checkpoint after N steps; the first one goes on until it is hurt, however long that takes.
``--until FILE`` ends every start after the first checkpoint at which rank 0 sees that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAVE_EVERY = 5
STEPS = 40
NEVER = 5000
"""A step that no test waits for."""


def first_states(world: int) -> list[int]:
    """The states before the first step."""
    return [_mix(rank, 0, 0.0) for rank in range(world)]


def loss_of(states: Sequence[int]) -> float:
    """What all states say together; the order of the sum is fixed."""
    total = 0.0
    for state in states:
        total += state / 2.0**64
    return total


def _mix(state: int, step: int, loss: float) -> int:
    data = struct.pack("<QQd", state, step, loss)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def losses(world: int, steps: int) -> dict[int, str]:
    """The loss of every step of a run without failures."""
    states, found = first_states(world), {}
    for step in range(1, steps + 1):
        loss = loss_of(states)
        found[step] = loss.hex()
        states = [_mix(state, step, loss) for state in states]
    return found


class Store:
    """The checkpoint folder: one file a step, complete or not there, and none by a launch that was replaced."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder = folder
        self.epoch = epoch
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> dict[str, Any] | None:
        """The newest checkpoint."""
        found = sorted(self.folder.glob("ring-*.json"))
        return dict(json.loads(found[-1].read_text())) if found else None

    def save(self, step: int, states: Sequence[int]) -> None:
        """Write one checkpoint durably. An OSError is the program's to die of."""
        temporary = self.folder / f".ring-{step:08d}.{self.epoch}"
        with temporary.open("w") as file:
            json.dump({"step": step, "states": list(states)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / f"ring-{step:08d}.json")


class PeerSilent(Exception):
    """A peer did not answer."""


class Ring:
    """The collective: every rank's state goes to rank 0, and all states come back."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.patience: float | None = None
        self.address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = self._accept() if rank == 0 else {0: self._dial()}

    def _accept(self) -> dict[int, socket.socket]:
        peers = {}
        with socket.create_server(("", self.address[1]), backlog=self.world) as server:
            while len(peers) < self.world - 1:
                peer = server.accept()[0]
                peers[struct.unpack("<Q", self._hear(peer, 8))[0]] = peer
        return peers

    def _dial(self) -> socket.socket:
        while True:
            try:
                sock = socket.create_connection(self.address, timeout=None)
                sock.sendall(struct.pack("<Q", self.rank))
                return sock
            except OSError:
                time.sleep(0.05)

    def meet(self, state: int) -> list[int]:
        """Return every rank's state."""
        form = struct.Struct(f"<{self.world}Q")
        if self.rank != 0:
            self.peers[0].sendall(struct.pack("<Q", state))
            return list(form.unpack(self._hear(self.peers[0], form.size)))
        heard = {rank: struct.unpack("<Q", self._hear(peer, 8))[0] for rank, peer in self.peers.items()}
        states = [state, *(heard[rank] for rank in range(1, self.world))]
        for peer in self.peers.values():
            peer.sendall(form.pack(*states))
        return states

    def _hear(self, peer: socket.socket, size: int) -> bytes:
        peer.settimeout(self.patience)
        data = b""
        while len(data) < size:
            try:
                more = peer.recv(size - len(data))
            except TimeoutError:
                more = b""
            if not more and self.patience is not None:
                raise PeerSilent("a peer did not answer in time")
            if not more:
                time.sleep(10_000)  # a peer is gone: the collective never ends
            data += more
        return data


def main() -> int:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--step-time", type=float, default=0.2)
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--then", type=int)
    parser.add_argument("--patience", type=float)
    parser.add_argument("--until", type=Path)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = Store(Path(os.environ["TRANSOM_CHECKPOINT_DIR"]), int(os.environ["TRANSOM_EPOCH"]))
    ring = Ring(rank, world)
    # Rank 0 says what all go on from: the folder may change while ranks start one after another.
    kept = store.newest() if rank == 0 else None
    start = ring.meet((kept["step"] if kept else 0) if rank == 0 else 0)[0]
    states = (
        first_states(world)
        if start == 0
        else json.loads((store.folder / f"ring-{start:08d}.json").read_text())["states"]
    )
    print(f"going on after {start} steps", flush=True)
    state = states[rank]
    steps = options.steps or (STEPS if options.then is options.until is None else NEVER)
    last = steps if start == 0 or options.then is None else min(steps, start + options.then)
    ring.patience = options.patience
    for step in range(start + 1, last + 1):
        time.sleep(options.step_time)
        if step == options.raise_at:
            raise ValueError(f"tensor of rank {rank} has the wrong shape")
        loss = loss_of(ring.meet(state))
        state = _mix(state, step, loss)
        print(f"step {step} loss {loss.hex()}", flush=True)
        if step % SAVE_EVERY == 0:
            states = ring.meet(state)
            if rank == 0:
                store.save(step, states)
                print(f"saved {step}", flush=True)
            if options.until and ring.meet(int(options.until.exists()))[0]:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
