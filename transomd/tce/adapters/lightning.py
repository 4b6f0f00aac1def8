"""PyTorch Lightning: ``Trainer(plugins=[TransomCheckpointIO("checkpoints")])``.

Lightning decides when to save and what to keep. At the path that it names lies a small pointer; the checkpoint itself
lies in the directory, under its step, durable and verified like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from transomd.tce.adapters.randomness import put_back, random_states
from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.engine import CheckpointEngine
from transomd.tce.environment import whole_number
from transomd.tce.errors import CheckpointError
from transomd.tce.files import make_folder, sync_folder, write_file
from transomd.tce.handle import SaveHandle
from transomd.tce.manifest import MANIFEST, parse_step_folder, step_folder
from transomd.tce.retention import remove_checkpoint

_PLACES = ("lightning.pytorch", "pytorch_lightning")
_EVERYTHING = 1 << 30
_EXACT = "transom"


def _lightning(module: str, name: str) -> Any:
    """A class of the Lightning that the program uses, of the two packages it comes in; ``object`` without any."""
    for place in sorted(_PLACES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(f"{place}.{module}"), name)
    return object


_Base: Any = _lightning("plugins.io", "CheckpointIO")
_Callback: Any = _lightning("callbacks", "Callback")


class TransomCheckpointIO(_Base):  # type: ignore[misc]
    """Saves and loads Lightning's checkpoints through a :class:`CheckpointEngine` in ``directory``.

    ``directory`` is TRANSOM_CHECKPOINT_DIR if it is left out. ``engine``: further arguments of the engine. For
    strategies under which rank 0 holds the whole state (one device, DDP).
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, **engine: Any) -> None:
        super().__init__()
        found = directory or os.environ.get("TRANSOM_CHECKPOINT_DIR")
        if not found:
            raise CheckpointError("no directory is given, and TRANSOM_CHECKPOINT_DIR is not set")
        self.directory = Path(os.path.abspath(found))
        epoch = whole_number(os.environ, "TRANSOM_EPOCH")
        # Lightning means every save that it asks for, so none is skipped.
        ours = {"rank": 0, "world_size": 1, "replicated": True, "strict": True, "when_full": "wait"}
        self._arguments = {**ours, "epoch": epoch, **engine}
        self._engine: CheckpointEngine | None = None
        self._last = -1
        self._pending: dict[Path, SaveHandle] = {}
        self._going: list[Path] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save; when this returns the program may go on. CheckpointError names what could not be loaded again."""
        if storage_options is not None:
            raise CheckpointError("storage_options mean nothing to transom", hint="leave them out")
        step = int(checkpoint["global_step"])
        if step != self._last:
            self._save(step, checkpoint)
        _point(Path(path), self._folder_of(step))
        self._settle()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved, verified, on the host. ``path``: where Lightning saved it, or what ``newest`` returned."""
        from transomd.tce.portable import gather

        folder = Path(path) if Path(path).is_dir() else _pointed(Path(path))
        if folder in self._pending:
            self._pending[folder].wait("storage")
        return gather(folder, own=True).state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once a newer one is complete: at once, or later."""
        self._going.append(Path(path))
        self._settle()

    def teardown(self) -> None:
        """Wait until what was saved is on the disk."""
        if self._engine is not None:
            self._engine.close()
            self._settle()
            self._engine, self._last = None, -1

    def newest(self) -> str | None:
        """The newest checkpoint that is good, for ``trainer.fit(ckpt_path=...)``; None: begin anew.

        At most that of TRANSOM_RESUME_STEP. Reads every byte. CheckpointError if there are some and none is good.
        """
        for handle in self._pending.values():
            # One that failed is not among those that are looked at below.
            with contextlib.suppress(CheckpointError):
                handle.wait("storage")
        bound = whole_number(os.environ, "TRANSOM_RESUME_STEP")
        found = [c for c in list_checkpoints(self.directory) if c.complete and (bound is None or c.step <= bound)]
        for item in found:
            if not verify(item.path):
                return str(item.path)
        if found:
            hint = f"transom ckpt verify {self.directory}"
            raise CheckpointError(f"{self.directory} holds checkpoints and none is good", hint=hint)
        return None

    def _save(self, step: int, checkpoint: dict[str, Any]) -> None:
        if self._engine is not None and step < self._last:
            # The program went back, in one process: what it saves from here on is of another start.
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._engine = CheckpointEngine(self.directory, keep=_EVERYTHING, **self._arguments)
        if (self._folder_of(step) / MANIFEST).exists():
            raise CheckpointError(
                f"{self.directory}: step {step} was saved in epoch {self._engine.epoch} already: the program went back",
                hint="leave TRANSOM_EPOCH out, or go back by starting the program anew",
            )
        self._pending[self._folder_of(step)] = self._engine.save(step, checkpoint)
        self._last = step

    def _folder_of(self, step: int) -> Path:
        assert self._engine is not None
        return self.directory / step_folder(step, self._engine.epoch)

    def _settle(self) -> None:
        """Remove what is to go, but never the newest complete checkpoint, nor anything while a save is under way."""
        under_way = {path: one for path, one in self._pending.items() if not one.done("storage")}
        self._pending = {path: one for path, one in under_way.items() if one.error is None}
        if self._pending or not self._going:
            return
        newest = next((item.path for item in list_checkpoints(self.directory) if item.complete), None)
        for path in list(self._going):
            folder = self._ours(path)
            if folder is not None and folder == newest:
                continue
            self._going.remove(path)
            with contextlib.suppress(OSError):
                path.unlink()
            if folder is not None and not _named(folder, path.parent):
                remove_checkpoint(folder)

    def _ours(self, path: Path) -> Path | None:
        """The checkpoint at ``path``, if it is one of this directory: a file may say anything."""
        folder = path
        if path.is_file():
            try:
                folder = _pointed(path)
            except CheckpointError:
                return None
        known = folder.parent == self.directory and parse_step_folder(folder.name) is not None
        return folder if known else None


class ExactResume(_Callback):  # type: ignore[misc]
    """Adds to Lightning's checkpoints what it leaves out: random states and, amid an accumulation, the gradients.

    With it a run on one device that was cut goes on to the bit, if its data loader keeps its place (``state_dict``).
    """

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse several devices: rank 0 alone saves, and each has random states and gradients of its own."""
        if trainer.world_size > 1:
            raise CheckpointError("ExactResume is for one device", hint="leave it out of the Trainer's callbacks")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add to what is saved."""
        amid = pl_module.automatic_optimization and not trainer.is_last_batch
        done = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches if amid else 0
        named = pl_module.named_parameters() if done or not pl_module.automatic_optimization else ()
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        random = random_states(distributed=False)
        checkpoint[_EXACT] = {"random": random, "gradients": gradients, "amid": not trainer.is_last_batch}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take what was added; a checkpoint without it is as good as Lightning's own."""
        self._found = checkpoint.get(_EXACT) if trainer.state.fn == "fit" else None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on from the random states before an epoch draws its order."""
        if self._found is not None:
            put_back(self._found["random"])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the first batch, put back what amid an epoch comes after its order was drawn."""
        found, self._found = self._found, None
        if found is None or not found["amid"]:
            return
        put_back(found["random"])
        for name, parameter in pl_module.named_parameters():
            if name in found["gradients"]:
                parameter.grad = found["gradients"][name].to(parameter.device)


def _point(path: Path, folder: Path) -> None:
    """Put a pointer to a checkpoint at ``path``, durably."""
    content = json.dumps({"transom": 1, "directory": str(folder.parent), "folder": folder.name}).encode() + b"\n"
    make_folder(path.absolute().parent)
    write_file(path, len(content), [content])
    sync_folder(path.absolute().parent)


def _pointed(path: Path) -> Path:
    """The folder of the checkpoint to which the file at ``path`` points; CheckpointError if it points nowhere."""
    try:
        told = json.loads(path.read_bytes()[:65536])
        return Path(str(told["directory"])) / str(told["folder"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        hint = f"a checkpoint of Lightning's own: transom ckpt import {path} DIR"
        raise CheckpointError(f"{path}: is no pointer to a checkpoint of transom's", hint=hint) from error


def _named(folder: Path, place: Path) -> bool:
    """Whether another pointer in the folder ``place`` leads there too (``last.ckpt``)."""
    for path in place.iterdir() if place.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            if path.is_file() and path.stat().st_size < 65536 and _pointed(path) == folder:
                return True
    return False
