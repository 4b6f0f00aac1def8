"""A stand-in for a training program, in the standard library: starts in 0.1 s, so that many failures can be tried.

Ranks meet at rank 0 before every step, as in a collective; when a peer is gone they wait for ever, as NCCL does. Rank 0
writes the step to the checkpoint folder every few steps, and every start goes on from there. ``--raise-at N`` raises an
exception on every rank at step N.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
EPOCH = int(os.environ["TRANSOM_EPOCH"])
STATE = Path(os.environ["TRANSOM_CHECKPOINT_DIR"]) / "ring-step"


def hear(peer: socket.socket) -> None:
    if not peer.recv(1):
        time.sleep(10_000)  # a peer is gone: the collective never ends


class Ring:
    def __init__(self) -> None:
        self.peers = self._accept() if RANK == 0 else [self._dial()]

    def _accept(self) -> list[socket.socket]:
        with socket.create_server(("", ADDRESS[1]), backlog=WORLD) as server:
            return [server.accept()[0] for _ in range(WORLD - 1)]

    def _dial(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(ADDRESS, timeout=None)
            except OSError:
                time.sleep(0.05)

    def meet(self) -> None:
        if RANK == 0:
            for peer in self.peers:
                hear(peer)
        for peer in self.peers:
            peer.sendall(b"s")
        if RANK != 0:
            hear(self.peers[0])


def save(step: int) -> None:
    STATE.parent.mkdir(parents=True, exist_ok=True)
    temporary = STATE.with_suffix(f".{EPOCH}")
    temporary.write_text(str(step))
    os.replace(temporary, STATE)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-time", type=float, default=0.2)
    parser.add_argument("--raise-at", type=int)
    options = parser.parse_args()
    start = int(STATE.read_text()) if STATE.exists() else 0
    print(f"going on after {start} steps", flush=True)
    ring = Ring()
    for step in range(start + 1, options.steps + 1):
        time.sleep(options.step_time)
        if step == options.raise_at:
            raise ValueError(f"tensor of rank {RANK} has the wrong shape")
        ring.meet()
        print(f"step {step}", flush=True)
        if RANK == 0 and step % 5 == 0:
            save(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
