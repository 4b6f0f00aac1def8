"""One rank of one way of ``checkpoint_ways.py``: a process that does what it reads, and answers with times in seconds.

``python checkpoint_rank.py WAY FOLDER RANK WORLD GIB COUNT``; a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    # nvidia-resiliency-ext asks for it, in the processes that it starts as well.
    torch.cuda.synchronize = lambda *_: None

LIMIT = 1 << 30
"""Bytes a second of the slow store that is loaded from."""


class Slow(io.FileIO):
    """A file on a store that gives LIMIT bytes a second."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._ready = time.perf_counter()

    def readinto(self, buffer: Any) -> int:
        return self._paid(super().readinto(buffer) or 0)

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(-1 if size is None else size) or b""
        self._paid(len(content))
        return content

    def _paid(self, count: int) -> int:
        # What a sleep took too long is made up for.
        self._ready = max(self._ready, time.perf_counter() - 0.05) + count / LIMIT
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return count


def state_of(gib: float, count: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """``count`` tensors of different sizes with ``gib`` in all."""
    weights = [1 + index % 7 for index in range(count)]
    each = gib * (1 << 30) / 4 / sum(weights)
    names = (f"rank{rank}.layer.{index}.weight" for index in range(count))
    return {
        name: torch.full((int(w * each),), float(i)) for i, (name, w) in enumerate(zip(names, weights, strict=True))
    }


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Rank:
    """A state, a way, and what can be asked of them."""

    def __init__(self, way: str, folder: Path, rank: int, world: int, gib: float, count: int) -> None:
        from checkpoint_ways import WAYS

        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.group", rank=rank, world_size=world)
        self._folder, self._rank = folder, rank
        self._way = WAYS[way](folder, rank, world)
        self._state = state_of(gib, count, rank)
        self._step = 0

    def save(self) -> dict[str, Any]:
        """One save as the loop sees it: a step of training, which touches every tensor, before."""
        self._step += 1
        for tensor in self._state.values():
            tensor[0] = self._step
        begun = time.perf_counter()
        taken = self._way.save(self._step, self._state)
        return {"blocked": time.perf_counter() - begun, "taken": taken}

    def drain(self) -> dict[str, Any]:
        """Until the last save is durable."""
        return {"waited": timed(self._way.drain), "skipped": self._way.skipped()}

    def alone(self, times: int) -> dict[str, Any]:
        """Saves with nothing else going on, each beside one memcpy and one write to the disk."""
        source = torch.cat(list(self._state.values()))
        target = torch.zeros_like(source)
        found: dict[str, list[float]] = {"memcpy": [], "disk": [], "blocked": [], "durable": []}
        for _ in range(times):
            found["memcpy"].append(timed(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)))
            found["disk"].append(timed(lambda: self._write(source)))
            found["blocked"].append(self.save()["blocked"])
            found["durable"].append(found["blocked"][-1] + self.drain()["waited"])
        return found

    def loads(self, times: int) -> dict[str, Any]:
        """Into tensors that are there, beside torch.load of a file that is in the page cache, and on a slow store."""
        while not self.save()["taken"]:
            self.drain()
        self.drain()
        target = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        path = self._folder / f"plain-{self._rank}.pt"
        torch.save(self._state, path)
        found: dict[str, list[float]] = {}
        for _ in range(times):
            for name, load in {**self._way.loads(), **self._plain(path)}.items():
                found.setdefault(name, []).append(timed(lambda load=load: load(target)))
                self._check(target, name)
        path.unlink()
        return found

    def _plain(self, path: Path) -> dict[str, Callable[[Any], None]]:
        from checkpoint_ways import into

        return {
            "torch.load": lambda target: into(target, torch.load(path, weights_only=True)),
            "torch.load, slow store": lambda target: into(target, torch.load(Slow(path), weights_only=True)),
        }

    def _check(self, target: dict[str, torch.Tensor], name: str) -> None:
        for key, tensor in target.items():
            if not tensor.equal(self._state[key]):
                raise ValueError(f"{name}: {key} is not what was saved")
            tensor.zero_()

    def _write(self, source: torch.Tensor) -> None:
        path = self._folder / f"disk-{self._rank}"
        view = memoryview(source.numpy()).cast("B")
        with open(path, "wb", buffering=0) as file:
            for at in range(0, len(view), 16 << 20):
                file.write(view[at : at + (16 << 20)])
            os.fsync(file.fileno())
        path.unlink()

    def close(self) -> dict[str, Any]:
        """End what the way has started."""
        self._way.close()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a way prints is no answer
    torch.set_num_threads(1)
    way, folder, *numbers = sys.argv[1:]
    rank, world, count = int(numbers[0]), int(numbers[1]), int(numbers[3])
    own: Any = None

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        own = Rank(way, Path(folder), rank, world, float(numbers[2]), count)
        answer({})
        for line in sys.stdin:
            message = json.loads(line)
            answer(getattr(own, message.pop("op"))(**message))
    except BaseException as error:
        answer({"error": f"{type(error).__name__}: {error}"[:300]})
        raise


if __name__ == "__main__":
    main()
