"""Programs that save for ever and programs that load, forked from one that has imported torch; see tce_kills.py."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nursery import end_with_parent

from transomd.tce import CheckpointEngine, CheckpointError, restore
from transomd.tce.memory import link

BEGUN, TRIED, MEMORY, REPLICA, STORAGE = range(5)
NEVER = 1_000_000


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """Every element says of which tensor, place and step it is."""
    return {
        "shared": {str(i): torch.arange(size) * (i + 1) + 1_000_003 * step for i in range(4)},
        "turned": (torch.arange(72).reshape(8, 9) + step).t(),
        "own": torch.arange(100, dtype=torch.float64) * 7 + 1000 * step + rank,
        "step": (step, rank, f"step {step} of rank {rank}"),
    }


class Notes:
    """What programs have been promised, in memory that outlives them: one row of numbers for each rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._rows = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        for index in range(8 * ranks):
            self._rows[index] = -1

    def put(self, rank: int, what: int, step: int) -> None:
        """Note a number."""
        self._rows[8 * rank + what] = step

    def all(self, what: int) -> list[int]:
        """The numbers of all ranks."""
        return [self._rows[8 * rank + what] for rank in range(self.ranks)]


@dataclass(frozen=True)
class Plan:
    """How the programs of one kill save. ``agents``: where the keeper of each rank's node listens ('': its own)."""

    directory: Path
    ranks: int
    size: int
    pause: float = 0.0
    every: int = 1
    memory: bool = True
    copied: bool = False
    start: Callable[[Path], None] | None = None
    agents: tuple[str, ...] = ()

    def engine(self, rank: int, epoch: int, agents: tuple[str, ...]) -> CheckpointEngine:
        """This rank's engine."""
        if agents:
            os.environ["TRANSOM_AGENT"] = agents[rank]
        if self.start is not None:
            link._start = self.start
        return CheckpointEngine(
            self.directory,
            rank=rank,
            world_size=self.ranks,
            epoch=epoch,
            replicated=("shared",),
            memory=self.memory,
            storage_every=self.every,
        )


def save_for_ever(plan: Plan, rank: int, notes: Notes) -> None:
    """Save steps 1, 2, 3 ...; note what was promised, once it was. No rank is ahead by more than a step."""
    engine = plan.engine(rank, 1, plan.agents)
    handles: list[Any] = []
    for step in range(1, 1_000_000):
        while min(notes.all(TRIED)) < step - 1 and step > 1:
            time.sleep(0.0002)
        notes.put(rank, BEGUN, step)
        handle = engine.save(step, state_of(step, rank, plan.size))
        if handle.done("memory") or handle.done("storage"):
            notes.put(rank, MEMORY, step)
        if plan.copied:
            with contextlib.suppress(CheckpointError, TimeoutError):
                handle.wait("replica", timeout=60)
        handles = [*handles[-5:], handle]
        for what, stage in ((REPLICA, "replica"), (STORAGE, "storage")):
            reached = [each.step for each in handles if each.done(stage)]
            notes.put(rank, what, max([notes.all(what)[rank], *reached]))
        notes.put(rank, TRIED, step)
        time.sleep(plan.pause)


def forked(work: Callable[[], None], log: Path) -> int:
    """Run ``work`` in a child, which tells ``log`` of what it meets and never returns."""
    child = os.fork()
    if child == 0:
        end_with_parent()
        try:
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def loads(plan: Plan, epoch: int, agents: tuple[str, ...], log: Path) -> list[dict[str, Any]]:
    """What each rank loads, all together, as after a restart: ``step``, ``source``, ``wrong``."""
    sides = socket.socketpair()
    pipes = [os.pipe() for _ in range(plan.ranks)]
    children = [
        forked(partial(_load, plan, rank, epoch, agents, sides, pipes[rank][1]), log) for rank in range(plan.ranks)
    ]
    for side in sides:
        side.close()
    told = []
    for (end, other), child in zip(pipes, children, strict=True):
        os.close(other)
        with os.fdopen(end) as pipe:
            content = pipe.read()
        os.waitpid(child, 0)
        told.append(json.loads(content) if content else {"step": -1, "source": "", "wrong": "died while loading"})
    return told


def _load(plan: Plan, rank: int, epoch: int, agents: tuple[str, ...], sides: Any, out: int) -> None:
    sides[1 - rank].close()
    if plan.ranks > 1:
        with sides[rank].makefile("rwb") as wire:
            restore.group_exchange = lambda _: lambda value: _exchange(wire, rank, value)
            told = _loaded(plan, rank, epoch, agents)
    else:
        told = _loaded(plan, rank, epoch, agents)
    os.write(out, json.dumps(told).encode())


def _exchange(wire: Any, rank: int, value: Any) -> list[Any]:
    """Stands for the process group of two ranks, which takes longer to form than all the rest."""
    wire.write(json.dumps(value).encode() + b"\n")
    wire.flush()
    content = wire.readline()
    if not content:
        raise ConnectionError("the other rank has failed")
    other = json.loads(content)
    return [value, other] if rank == 0 else [other, value]


def _loaded(plan: Plan, rank: int, epoch: int, agents: tuple[str, ...]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    engine = None
    try:
        engine = plan.engine(rank, epoch, agents)
        step = engine.load(state)
    except Exception as error:
        traceback.print_exc()
        return {"step": -1, "source": "", "wrong": f"{type(error).__name__}: {error}"}
    wrong = "" if step is None else _differs(state, state_of(step, rank, plan.size))
    return {"step": -1 if step is None else step, "source": engine.resumed_from, "wrong": wrong}


def _differs(state: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What is not exactly as it was saved."""
    pairs = [(f"shared {key}", state["shared"].get(key), value) for key, value in wanted["shared"].items()]
    pairs += [(key, state.get(key), wanted[key]) for key in ("turned", "own")]
    bad = [name for name, got, value in pairs if got is None or got.dtype != value.dtype or not torch.equal(got, value)]
    return ", ".join([*bad, *(["step"] if state.get("step") != wanted["step"] else [])])
