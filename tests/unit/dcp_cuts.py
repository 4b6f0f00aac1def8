"""Power cuts at every point of saves through DCP: what loads of every disk that may be left. See tce_disk.py."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tce_cuts import LATER, looked_at
from tce_disk import Disk, Op, Turns
from test_dcp_reshard import Planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.dcp import TransomStorageWriter, commit, load_newest

ROWS = 700
"""Of each rank's shard; with a page for the header it takes several blocks of the disk."""


def tensor_of(step: int, ranks: int) -> torch.Tensor:
    """Every element says its place and its step."""
    return torch.arange(ranks * ROWS) + 1_000_000 * step


class Program:
    """Ranks that save through DCP, by the calls that it makes, on a disk that is recorded."""

    def __init__(self, root: Path, seed: int, ranks: int) -> None:
        self._dice, self._ranks, self._me = random.Random(seed), ranks, threading.local()
        self._turns = Turns(self._dice, 1)
        self.disk = Disk(root, lambda: self._turns.step(self._me.rank))
        self._place = root / "c"

    def train(self, starts: Sequence[int]) -> list[Op]:
        """What the saves do to the disk and what the program is told; each start saves so many steps."""
        steps = iter(range(1, sum(starts) + 1))
        with self.disk.recording():
            for epoch, count in enumerate(starts, 1):
                writers = [writer_of(self._place, epoch) for _ in range(self._ranks)]
                for _ in range(count):
                    self._save(writers, next(steps))
        return self.disk.ops

    def _save(self, writers: list[TransomStorageWriter], step: int) -> None:
        self._turns, self._me.rank = Turns(self._dice, 1), 0
        tensor = tensor_of(step, self._ranks)
        properties = TensorProperties(dtype=tensor.dtype)
        chunks = [ChunkStorageMetadata(torch.Size([rank * ROWS]), torch.Size([ROWS])) for rank in range(self._ranks)]
        writers[0].reset(str(step))
        plans = writers[0].prepare_global_plan([_plan(chunk, properties, tensor) for chunk in chunks])
        results = self._written(writers, step, plans, Planner(tensor))
        self._turns = Turns(self._dice, 1)
        about = TensorStorageMetadata(properties, tensor.shape, chunks)
        writers[0].finish(Metadata({"t": about}), results)
        self.disk.promised(step)

    def _written(
        self, writers: list[TransomStorageWriter], step: int, plans: list[SavePlan], planner: Any
    ) -> list[list[Any]]:
        """What each rank has written, in one of the orders that may be."""
        turns = self._turns = Turns(self._dice, self._ranks)
        results: dict[int, list[Any]] = {}

        def write(rank: int) -> None:
            self._me.rank = rank
            try:
                writers[rank].reset(str(step))
                results[rank] = writers[rank].write_data(plans[rank], planner).wait()
            finally:
                turns.leave()

        threads = [threading.Thread(target=write, args=(rank,)) for rank in range(self._ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(self._ranks)]


def writer_of(place: Path, epoch: int) -> TransomStorageWriter:
    """Two checkpoints are kept."""
    return TransomStorageWriter(place, epoch=epoch, keep=2, memory=False)


def _plan(chunk: ChunkStorageMetadata, properties: TensorProperties, tensor: torch.Tensor) -> SavePlan:
    data = TensorWriteData(chunk, properties, tensor.shape)
    return SavePlan([WriteItem(MetadataIndex("t", chunk.offsets), WriteItemType.SHARD, tensor_data=data)])


def found(seed: int, ranks: int, shares: Sequence[float], folder: Path) -> tuple[int, list[str]]:
    """How many disks were looked at in one run, and what is wrong with what loads of them."""
    (folder / "disk").mkdir(parents=True)
    ops = Program(folder / "disk", seed, ranks).train((2, 1))
    return looked_at(ops, seed, shares, folder, partial(judged, ranks), 0.1)


def judged(ranks: int, promised: int, folder: Path, go_on: bool) -> str:
    """What is wrong with a disk: '' if what counts as complete is whole, and none that was promised is missing.

    ``go_on``: also whether the next start can save and load.
    """
    place = folder / "c"
    try:
        complete = [item.path for item in list_checkpoints(place) if item.complete] if place.exists() else []
        if torn := [problem for path in complete for problem in verify(path)]:
            return f"counts as complete: {torn}"
        step = _load(place, ranks)
        if step < promised:
            return f"loaded {step}, promised {promised}"
        if go_on:
            commit.RESUMED.clear()
            dcp.save({"t": tensor_of(99, ranks)}, storage_writer=writer_of(place, LATER), checkpoint_id="99")
            return "" if _load(place, ranks) == 99 else "99 is not loaded"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load(place: Path, ranks: int) -> int:
    state = {"t": torch.zeros(ranks * ROWS, dtype=torch.int64)}
    step = load_newest(state, place)
    if step is None:
        return -1
    assert torch.equal(state["t"], tensor_of(step, ranks)), f"step {step} is torn"
    return step
