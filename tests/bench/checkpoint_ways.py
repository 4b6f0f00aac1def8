"""The ways to save and load that ``checkpoint.py`` sets beside each other, each used as its own documentation says.

A way that allows one save at a time waits for the one before, which counts: that is what a training loop would see.
Where a way does not fsync, the bench does, so that *durable* means the same for all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

State = dict[str, torch.Tensor]
Loads = dict[str, Callable[[State], None]]


class Way:
    """One way to save. ``folder`` belongs to all ranks of the way."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world

    def save(self, step: int, state: State) -> bool:
        """Save, and return when ``state`` may change; False if the step was skipped."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until the last save is durable."""

    def loads(self) -> Loads:
        """How the last save is loaded into tensors that are there, by where from."""
        return {}

    def skipped(self) -> int:
        """Saves that were skipped and that ``save`` did not tell of."""
        return 0

    def close(self) -> None:
        """End its processes."""


class Tce(Way):
    """transom's engine, as a program uses it."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder, rank, world)
        from transomd.tce import CheckpointEngine

        self._kind = CheckpointEngine
        self._engine = CheckpointEngine(folder, rank=rank, world_size=world, keep=2)
        self._handle: Any = None

    def save(self, step: int, state: State) -> bool:
        self._handle = self._engine.save(step, {"model": state, "step": step})
        return True

    def drain(self) -> None:
        self._handle.wait("storage", timeout=120)

    def loads(self) -> Loads:
        def load(target: State, memory: bool, engine: Any) -> None:
            engine.load({"model": target, "step": 0})
            assert (engine.resumed_from == "memory") == memory, engine.resumed_from

        def own(memory: bool) -> Callable[[State], None]:
            engine = self._kind(self.folder, rank=self.rank, world_size=self.world, memory=memory)
            return lambda target: load(target, memory, engine)

        return {"memory": own(True), "storage": own(False)}

    def skipped(self) -> int:
        return self._engine.skipped

    def close(self) -> None:
        self._engine.close()


class TorchSave(Way):
    """torch.save to a path, and fsync."""

    def save(self, step: int, state: State) -> bool:
        torch.save({"model": state, "step": step}, self._path)
        sync(self._path)
        return True

    def loads(self) -> Loads:
        return {"storage": lambda target: into(target, torch.load(self._path, weights_only=True)["model"])}

    @property
    def _path(self) -> Path:
        return self.folder / f"rank-{self.rank}.pt"


class DcpAsync(Way):
    """torch.distributed.checkpoint.async_save with a stager that is kept and shares its memory."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder, rank, world)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(False, True, False, False))
        self._before: Any = None
        self._target = folder

    def save(self, step: int, state: State) -> bool:
        self.drain()
        self._target = self.folder / str(step % 2)
        if self.rank == 0:
            shutil.rmtree(self._target, ignore_errors=True)
        response: Any = dcp.async_save(
            {"model": state},
            storage_writer=dcp.FileSystemWriter(self._target, sync_files=True),
            async_stager=self._stager,
            no_dist=self.world == 1,
        )
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
            response = response.upload_completion
        self._before = response
        return True

    def drain(self) -> None:
        if self._before is not None:
            self._before.result()
        self._before = None

    def loads(self) -> Loads:
        def load(target: State) -> None:
            reader = dcp.FileSystemReader(self._target)
            dcp.load({"model": target}, storage_reader=reader, no_dist=self.world == 1)

        return {"storage": load}

    def close(self) -> None:
        self._stager.close()


class Dlrover(Way):
    """DLRover's flash checkpoint without dlrover-run: its saver is a process that it starts."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder, rank, world)
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._own = DdpCheckpointer(str(folder), local_shard_num=world, global_shard_num=world)
        self._step = 0

    def save(self, step: int, state: State) -> bool:
        self._own.save_checkpoint(step, state, str(self.folder / str(step) / f"rank_{self.rank}.pt"))
        taken = bool(self._own._engine.latest_step == step)
        self._step = step if taken else self._step
        return taken

    def drain(self) -> None:
        tracker = self.folder / "dlrover_latest.txt"
        while not tracker.exists() or tracker.read_text().strip() != str(self._step):
            time.sleep(0.02)
        sync_tree(self.folder / str(self._step))
        if self.rank == 0:
            for folder in self.folder.iterdir():
                if folder.name.isdecimal() and folder.name != str(self._step):
                    shutil.rmtree(folder, ignore_errors=True)

    def loads(self) -> Loads:
        path = self.folder / str(self._step) / f"rank_{self.rank}.pt"
        return {
            "memory": lambda target: into(target, self._own.load_checkpoint()),
            "storage": lambda target: into(target, torch.load(path, weights_only=False)),
        }


class Torchsnapshot(Way):
    """torchsnapshot's async_take and restore."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder, rank, world)
        import torchsnapshot

        self._module = torchsnapshot
        self._pending: Any = None
        self._target = folder

    def save(self, step: int, state: State) -> bool:
        if self._pending is not None:
            self._pending.wait()
        self._target = self.folder / str(step % 2)
        if self.rank == 0:
            shutil.rmtree(self._target, ignore_errors=True)
        app = {"model": self._module.StateDict(**state)}
        self._pending = self._module.Snapshot.async_take(str(self._target), app)
        return True

    def drain(self) -> None:
        self._pending.wait()
        sync_tree(self._target)

    def loads(self) -> Loads:
        def load(target: State) -> None:
            self._module.Snapshot(str(self._target)).restore({"model": self._module.StateDict(**target)})

        return {"storage": load}


class Nvrx(Way):
    """nvidia-resiliency-ext's TorchAsyncCheckpoint. Made for GPUs: without one its copy to the host is a clone."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder, rank, world)
        from nvidia_resiliency_ext.checkpointing.async_ckpt import torch_ckpt

        if not torch.cuda.is_available():
            torch_ckpt.preload_tensors = cloned
        self._own = torch_ckpt.TorchAsyncCheckpoint()
        self._path = folder

    def save(self, step: int, state: State) -> bool:
        self._own.finalize_async_save(blocking=True)
        self._path = self.folder / f"{step % 2}-{self.rank}.pt"
        self._own.async_save({"model": state}, self._path)
        return True

    def drain(self) -> None:
        self._own.finalize_async_save(blocking=True)
        sync(self._path)

    def loads(self) -> Loads:
        return {"storage": lambda target: into(target, torch.load(self._path, weights_only=True)["model"])}

    def close(self) -> None:
        self._own.finalize_async_save(blocking=True, terminate=True)


WAYS: dict[str, type[Way]] = {
    "TCE": Tce,
    "torch.save + fsync": TorchSave,
    "dcp.async_save": DcpAsync,
    "DLRover": Dlrover,
    "torchsnapshot": Torchsnapshot,
    "nvidia-resiliency-ext": Nvrx,
}
PEERS = {"DLRover": "dlrover", "torchsnapshot": "torchsnapshot", "nvidia-resiliency-ext": "nvidia-resiliency-ext"}
"""The ways that need an environment of their own, and what is to be installed there."""


def cloned(state: Any) -> Any:
    """A state whose tensors are copies in new memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    return {key: cloned(value) for key, value in state.items()} if isinstance(state, dict) else state


def into(target: State, loaded: State) -> None:
    """Bring what was loaded into tensors that are there."""
    assert set(target) <= set(loaded), "something is missing in what was loaded"
    for name, tensor in target.items():
        tensor.copy_(loaded[name])


def sync(path: Path) -> None:
    """Fsync one file."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def sync_tree(folder: Path) -> None:
    """Fsync every file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
