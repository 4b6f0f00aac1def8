"""Measure TCE's memory tier beside torch.save and torch.distributed.checkpoint, interleaved, on this machine as it is.

``python tests/bench/checkpoint.py --dir DIR [--gib 1.0] [--repeats 7]`` prints Markdown tables. Seconds are worth what
the machine's memcpy and disk of the same run say beside them; ratios are worth more. Needs about 7 times the memory.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import logging
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from transomd.tce import CheckpointEngine
from transomd.tce.files import make_folder

Times = dict[str, list[float]]


def state_of(gib: float, count: int = 300) -> dict[str, torch.Tensor]:
    """``count`` tensors of different sizes with ``gib`` in all."""
    weights = [1 + index % 7 for index in range(count)]
    each = gib * (1 << 30) / 4 / sum(weights)
    return {f"layer.{i}.weight": torch.full((int(weight * each),), float(i)) for i, weight in enumerate(weights)}


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def change(state: dict[str, torch.Tensor], step: int) -> None:
    """A step of training: every tensor is touched."""
    for tensor in state.values():
        tensor[0] = step


class Bench:
    """One state, one folder, and a column of times for each way to save or load it."""

    def __init__(self, folder: Path, gib: float, repeats: int) -> None:
        self.folder = folder
        self.repeats = repeats
        self.state = state_of(gib)
        self.bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.times: Times = {}
        self.step = 0

    def note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    # --- the machine --------------------------------------------------------------------------------------------

    def memcpy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        """One memcpy of all bytes, one thread, both sides in memory already."""
        return timed(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes))

    def disk(self, source: torch.Tensor) -> float:
        """Write all bytes to one new file and fsync it."""
        path = self.folder / "disk"
        view = memoryview(source.numpy()).cast("B")

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                for at in range(0, len(view), 16 << 20):
                    file.write(view[at : at + (16 << 20)])
                os.fsync(file.fileno())

        seconds = timed(write)
        path.unlink()
        return seconds

    # --- saving -------------------------------------------------------------------------------------------------

    def copies(self, engine: CheckpointEngine) -> None:
        """The blocking copy alone, storage idle, beside one memcpy of the same bytes."""
        source = torch.cat(list(self.state.values()))
        target = torch.zeros_like(source)
        self.memcpy(source, target)
        for _ in range(self.repeats):
            self.note("memcpy, one thread", self.memcpy(source, target))
            self.note("disk, write and fsync", self.disk(source))
            self.note("TCE save() blocks", self.save(engine)[0])
            self.note("TCE until durable", self.durable)

    def save(self, engine: CheckpointEngine, wait: bool = True) -> tuple[float, Any]:
        self.step += 1
        change(self.state, self.step)
        begun = time.perf_counter()
        handle = engine.save(self.step, {"model": self.state, "step": self.step})
        blocked = time.perf_counter() - begun
        if wait:
            handle.wait("storage", timeout=120)
            self.durable = time.perf_counter() - begun
        return blocked, handle

    def torch_save(self) -> float:
        self.step += 1
        change(self.state, self.step)
        path = self.folder / "torch.pt"

        def write() -> None:
            torch.save({"model": self.state, "step": self.step}, path)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        return timed(write)

    def once_a_second(self, engine: CheckpointEngine, stager: DefaultStager) -> None:
        """What the loop sees of one save a second, each way in turn, a few seconds each."""
        for _ in range(2):
            for name in ("TCE", "torch.save + fsync", "dcp.async_save, reused shared stager"):
                future: Any = None
                for _ in range(max(4, -(-self.repeats // 2))):
                    begun = time.perf_counter()
                    if name == "TCE":
                        blocked, handle = self.save(engine, wait=False)
                    elif name.startswith("torch"):
                        blocked = self.torch_save()
                    else:
                        blocked, future = self.dcp_save(stager, future)
                    self.note(f"stall: {name}", blocked)
                    time.sleep(max(0.0, 1.0 - (time.perf_counter() - begun)))
                if name == "TCE":
                    handle.wait("storage", timeout=120)
                if future is not None:
                    future.result()

    def dcp_save(self, stager: DefaultStager, before: Any) -> tuple[float, Any]:
        """One async_save; two at a time tear checkpoints, so the one before is waited for, which counts."""
        self.step += 1
        change(self.state, self.step)
        target = self.folder / "dcp" / str(self.step % 2)
        begun = time.perf_counter()
        if before is not None:
            before.result()
        shutil.rmtree(target, ignore_errors=True)
        response: Any = dcp.async_save(
            {"model": self.state},
            storage_writer=dcp.FileSystemWriter(target, sync_files=True),
            async_stager=stager,
            no_dist=True,
        )
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
        return time.perf_counter() - begun, response

    # --- loading ------------------------------------------------------------------------------------------------

    def loads(self) -> None:
        """From own memory beside torch.load of a file in the page cache, into existing tensors both times."""
        target = {"model": {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}, "step": 0}
        self.torch_save()
        for _ in range(self.repeats):
            loader = CheckpointEngine(self.folder / "tce")
            self.note(MEMORY, timed(partial(loader.load, target)))
            self.note(TORCH, timed(partial(self.torch_load, target["model"])))
            other = CheckpointEngine(self.folder / "tce", memory=False)
            self.note(STORED, timed(partial(other.load, target)))

    def torch_load(self, target: Any) -> None:
        loaded = torch.load(self.folder / "torch.pt", weights_only=True)["model"]
        for name, tensor in loaded.items():
            target[name].copy_(tensor)


def table(bench: Bench) -> str:
    medians = {name: statistics.median(values) for name, values in bench.times.items()}
    base, gib = medians["memcpy, one thread"], bench.bytes / (1 << 30)
    out = io.StringIO()
    print("| what | median | min | max | n | GiB/s | times one memcpy |\n|---|---|---|---|---|---|---|", file=out)
    for name, values in bench.times.items():
        row = f"{medians[name]:.3f} s | {min(values):.3f} | {max(values):.3f} | {len(values)}"
        print(f"| {name} | {row} | {gib / medians[name]:.2f} | {medians[name] / base:.2f} |", file=out)
    print("\n| ratio | is |\n|---|---|", file=out)
    for name, over, under in RATIOS:
        print(f"| {name} | {medians[over] / medians[under]:.2f} |", file=out)
    return out.getvalue()


TORCH, MEMORY, STORED = (f"load: {way}" for way in ("torch.load, hot", "TCE, own memory", "TCE, storage, hot"))
RATIOS = (
    ("speed of the blocking copy over one memcpy", "memcpy, one thread", "TCE save() blocks"),
    ("stall of torch.save + fsync over TCE's", "stall: torch.save + fsync", "stall: TCE"),
    ("stall of dcp.async_save over TCE's", "stall: dcp.async_save, reused shared stager", "stall: TCE"),
    ("torch.load (hot) over load from own memory", TORCH, MEMORY),
    ("torch.load (hot) over load from storage", TORCH, STORED),
    ("time to durable over one write and fsync", "TCE until durable", "disk, write and fsync"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    make_folder(options.dir.absolute())
    bench = Bench(options.dir.absolute(), options.gib, options.repeats)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    with CheckpointEngine(bench.folder / "tce") as engine:
        for _ in range(3):
            bench.save(engine)
        bench.copies(engine)
        bench.once_a_second(engine, stager)
        bench.loads()
        skipped = engine.skipped
    stager.close()
    print(f"{bench.bytes / (1 << 30):.2f} GiB in {len(bench.state)} tensors, torch {torch.__version__}, one thread, ")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; saves skipped: {skipped}\n")
    print(table(bench))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
