"""A store that hangs for whoever asks it anything, is slow, or refuses for a while: the training goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tce_keepers import SOON_S, keepers, own_place, stop, wait_for

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.memory.link import Link, connect, hello

torch = pytest.importorskip("torch")
SERVER = Path(__file__).with_name("tce_fuse.py")


@dataclass
class Mounted:
    """A file system that does as ``orders`` say; ``server`` answers for it."""

    directory: Path
    orders: Path
    server: subprocess.Popen[str]


@pytest.fixture
def store() -> Iterator[Mounted]:
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("a file system of one's own needs root and /dev/fuse")
    with own_place() as mountpoint:
        behind, orders = mountpoint.parent / "behind", mountpoint.parent / "orders"
        mountpoint.mkdir()
        behind.mkdir()
        orders.write_text("")
        command = [sys.executable, str(SERVER), str(behind), str(mountpoint), str(orders)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            if server.stdout.readline() != "mounted\n":
                pytest.skip("this kernel mounts no FUSE here")
            try:
                yield Mounted(mountpoint / "c", orders, server)
                assert wait_for(lambda: not keepers(mountpoint.parent))
            finally:
                server.send_signal(signal.SIGCONT)
                subprocess.run(["umount", "-l", mountpoint], check=True)
                server.kill()


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(step)), "step": step}


def problems(link: Link) -> list[str]:
    told, _ = link.ask("status", timeout_s=60)
    return [str(rank["problem"]) for rank in told["ranks"]]


def two_ranks(directory: Path) -> list[CheckpointEngine]:
    return [CheckpointEngine(directory, rank=rank, world_size=2, epoch=1) for rank in (0, 1)]


def save(engines: list[CheckpointEngine], step: int) -> list[Any]:
    return [engine.save(step, state_of(step)) for engine in engines]


def stored(directory: Path) -> int:
    newest = next(item for item in list_checkpoints(directory) if item.complete)
    assert verify(newest.path) == []
    return newest.step


def test_a_store_that_answers_nothing_holds_up_no_save_and_no_keeper(store: Mounted) -> None:
    """Not even a look comes back, as from a network file system whose server is gone; then it does."""
    engines = two_ranks(store.directory)
    for handle in save(engines, 1):
        handle.wait(timeout=60)
    link = connect(store.directory, start=False)
    assert link is not None
    stop(store.server.pid)
    begun = time.monotonic()
    handles = [handle for step in range(2, 8) for handle in save(engines, step)]
    assert time.monotonic() - begun < SOON_S
    assert all(handle.done("memory") for handle in handles)
    assert hello(link, store.directory, 0, 2)["owned"], "a program that comes now is answered"
    assert wait_for(lambda: all("has taken" in problem for problem in problems(link))), problems(link)
    store.server.send_signal(signal.SIGCONT)
    for handle in handles[-2:]:
        handle.wait(timeout=60)
    assert problems(link) == ["", ""]
    link.close()
    for engine in engines:
        engine.close()
    assert stored(store.directory) == 7


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_a_store_that_refuses_for_a_while_gets_the_newest_step_afterwards(store: Mounted, code: int) -> None:
    """A quota, a file system that turned read-only, a server that has forgotten its files."""
    engines = two_ranks(store.directory)
    for handle in save(engines, 1):
        handle.wait(timeout=60)
    link = connect(store.directory, start=False)
    assert link is not None
    store.orders.write_text(f"refuse {code}")
    for step in range(2, 6):
        handles = save(engines, step)
    assert all(handle.done("memory") for handle in handles)
    assert wait_for(lambda: any(os.strerror(code) in problem for problem in problems(link))), problems(link)
    store.orders.write_text("")
    for handle in handles:
        handle.wait(timeout=60)
    assert wait_for(lambda: problems(link) == ["", ""])
    link.close()
    for engine in engines:
        engine.close()
    assert stored(store.directory) == 5


def test_a_slow_store_holds_up_no_save(store: Mounted) -> None:
    engines = two_ranks(store.directory)
    for handle in save(engines, 1):
        handle.wait(timeout=60)
    store.orders.write_text("slow 0.02")
    begun = time.monotonic()
    for step in range(2, 8):
        handles = save(engines, step)
    assert time.monotonic() - begun < SOON_S
    assert not any(handle.done("storage") for handle in handles)
    store.orders.write_text("")
    for handle in handles:
        handle.wait(timeout=60)
    for engine in engines:
        engine.close()
    assert stored(store.directory) == 7
