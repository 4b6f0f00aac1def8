"""Bringing the files of others in, as a complete checkpoint of transom's."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from transomd.tce.catalogue import newest_epoch, verify
from transomd.tce.engine import CheckpointEngine
from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder, sync_folder
from transomd.tce.manifest import step_folder
from transomd.tce.portable.nest import HINT, assemble, nested, refusal, value_of
from transomd.tce.portable.pickles import Piece, read_metadata
from transomd.tce.retention import IMPORTING

EPOCH = 0
"""Imports are older than every start of a program."""
_KEEP = 1 << 30


def bring_in(source: Path, directory: Path, *, step: int = 0, key: str = "") -> Path:
    """Make the checkpoint of ``step`` in ``directory`` from a DCP directory, a .safetensors or a torch.save file.

    ``key``: put it under this top-level key. Any number of ranks can load it. Returns its folder; it is complete and
    verified. CheckpointError if the source cannot be read without trusting a pickle, or the directory is in use.
    """
    _check_free(directory, step)
    state = read(source)
    if key:
        state = {key: state}
    if not isinstance(state, dict) or not all(type(name) is str for name in state):
        raise CheckpointError(
            f"{source}: holds a {type(state).__name__}, not a dict with names for keys",
            hint="name a key to put it under: --key model",
        )
    with _beside(directory) as place:
        folder = place / step_folder(step, EPOCH)
        with CheckpointEngine(
            place, rank=0, world_size=1, epoch=EPOCH, replicated=True, keep=_KEEP, strict=True, memory=False
        ) as engine:
            engine.save(step, state).wait("storage")
        if problems := verify(folder):
            raise CheckpointError(f"{folder}: {problems[0]}", hint="look at the disk, and try again")
        return _put(folder, directory, step)


@contextlib.contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """A folder in ``directory`` for this import alone, which goes at the end; so do parents, if nothing came of it."""
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    place = ""
    try:
        try:
            make_folder(directory)
            place = tempfile.mkdtemp(prefix=IMPORTING[0], suffix=IMPORTING[1], dir=directory)
        except OSError as error:
            raise storage_error("importing a checkpoint", error, directory, 0) from error
        yield Path(place)
    finally:
        if place:
            shutil.rmtree(place, ignore_errors=True)
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


def _put(folder: Path, directory: Path, step: int) -> Path:
    """Put a whole checkpoint in its place, unless another import, or a program, was faster."""
    _check_free(directory, step)
    target = directory / folder.name
    try:
        os.rename(folder, target)
        sync_folder(directory)
    except OSError as error:
        # Faster by an instant: a folder that holds something is never replaced.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _in_use(directory, step) from error
        raise storage_error(f"importing step {step}", error, directory, 0) from error
    return target


def read(source: Path) -> Any:
    """What a DCP directory, a .safetensors file or a torch.save file holds; CheckpointError says why it is not read."""
    if source.is_dir():
        return _read_dcp(source)
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{source}: {error.strerror or error}", hint="name a file or a directory") from error
    except SafetensorError as error:
        raise CheckpointError(f"{source}: is no safetensors file: {error}") from error
    except Exception as error:  # a file of something else may make it raise anything
        raise CheckpointError(f"{source}: {refusal(error)}", hint=HINT) from error


def _read_dcp(source: Path) -> dict[str, Any]:
    foreign = read_metadata(source / ".metadata")
    flat: dict[str, Any] = {}
    for fqn, (dtype, shape, chunks) in foreign.tensors.items():
        parts = [(offsets, value_of(fqn, _content(source, piece))) for offsets, piece in chunks.items()]
        if not all(isinstance(chunk, torch.Tensor) for _, chunk in parts):
            raise CheckpointError(f"{source}: {fqn}: is no tensor, though the metadata say so")
        flat[fqn] = assemble(fqn, shape, dtype, parts)
    for fqn, piece in foreign.values.items():
        flat[fqn] = value_of(fqn, _content(source, piece))
    return nested(flat, foreign.paths)


def _content(source: Path, piece: Piece) -> bytes:
    try:
        with open(source / piece.file, "rb") as file:
            file.seek(piece.offset)
            content = file.read(piece.length)
    except OSError as error:
        raise CheckpointError(f"{source / piece.file}: {error.strerror}") from error
    if len(content) != piece.length:
        raise CheckpointError(f"{source / piece.file}: is cut off: {len(content)} bytes where {piece.length} should be")
    return content


def _check_free(directory: Path, step: int) -> None:
    """An import into a directory where a program saves would come before what it saved."""
    try:
        newest = newest_epoch(directory)
    except OSError as error:
        raise storage_error(f"importing step {step}", error, directory, 0) from error
    if newest is not None:
        raise _in_use(directory, step)


def _in_use(directory: Path, step: int) -> CheckpointError:
    return CheckpointError(
        f"importing step {step} into {directory}: it holds checkpoints already",
        hint="import into a new directory, and let the job begin there",
    )
