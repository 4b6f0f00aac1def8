"""A checkpoint as one nested state of tensors and plain values, whoever wrote it and on however many ranks."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transomd.tce.catalogue import load_parts
from transomd.tce.dcp import staging
from transomd.tce.dcp.facts import DamagedError, written_by_dcp
from transomd.tce.dcp.source import Source
from transomd.tce.errors import CheckpointError
from transomd.tce.files import digest
from transomd.tce.layout import Layout, put_together
from transomd.tce.manifest import FileRecord, Part, StepManifest, read_step_manifest
from transomd.tce.payload import read_layout
from transomd.tce.portable.nest import assemble, nested, value_of

OnRead = Callable[[int], object]


@dataclass(frozen=True)
class Gathered:
    """A state, and the top-level keys in it that belong to one rank of several, while the others' are left out."""

    state: dict[str, Any]
    of_one_rank: tuple[str, ...] = ()


def gather(folder: Path, *, rank: int = 0, own: bool = False, on_read: OnRead = lambda count: None) -> Gathered:
    """Read the checkpoint in ``folder``, every byte verified; ``on_read`` is told how many bytes were read.

    Where ranks had keys of their own, those of ``rank`` are taken. Tensors are mapped from the file, and numpy arrays
    (and b"") come as tensors; but with ``own``, for a program to go on with, all is as it was, and copied.
    DamagedError names what is damaged, CheckpointError a rank that there is not.
    """
    try:
        manifest = read_step_manifest(folder)
        if written_by_dcp(manifest):
            return Gathered(_sharded(folder, on_read))
        return _of_ranks(folder, manifest, rank, own, on_read)
    except (FileNotFoundError, ValueError) as error:
        raise DamagedError(f"{folder}: {error}", hint=f"transom ckpt verify {folder.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}", hint=f"ls -la {folder}") from error


def _of_ranks(folder: Path, manifest: StepManifest, rank: int, own: bool, on_read: OnRead) -> Gathered:
    if not 0 <= rank < manifest.world_size:
        raise CheckpointError(f"{folder}: there is no rank {rank}, of {manifest.world_size} that saved it")
    wanted = [part for part in manifest.parts if rank in part.ranks]
    state: dict[str, Any] = {}
    alone: list[str] = []
    for part in load_parts(folder, manifest, {part.name for part in wanted}):
        state.update(_part(folder, part, own, on_read))
        if manifest.world_size > 1 and len(part.ranks) == 1:
            alone += part.keys
    return Gathered(state, tuple(alone))


def _part(folder: Path, part: Part, own: bool, on_read: OnRead) -> dict[str, Any]:
    try:
        layout = read_layout(folder, part)
    except CheckpointError as error:
        raise DamagedError(str(error), hint=f"transom ckpt verify {folder.parent}") from error
    tensors: dict[str, torch.Tensor] = {}
    for file in part.files:
        tensors.update(_mapped(folder, file, on_read))
    if own:
        # A mapping would end with the file, which retention may remove while the program goes on.
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return put_together(layout, list(part.keys), copies.__getitem__)
    # Arrays are tensors in the file and stay so: torch.load(weights_only=True) would refuse them, and empty bytes.
    return put_together(Layout(layout.tree, layout.tensors), list(part.keys), tensors.__getitem__)


def _mapped(folder: Path, file: FileRecord, on_read: OnRead) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped and verified."""
    if not file.tensors:
        return {}
    with open(folder / file.name, "rb") as opened:
        memory = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    found = {}
    for record in file.tensors:
        if digest(memory[record.offset : record.offset + record.bytes]) != record.xxh3_128:
            told = f"{folder / file.name}: tensor {record.name} is damaged"
            raise DamagedError(told, hint=f"transom ckpt verify {folder.parent}")
        dtype: torch.dtype = getattr(torch, record.dtype)
        if record.bytes:
            count = record.bytes // dtype.itemsize
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=record.offset)
            found[record.name] = flat.view(record.shape)
        else:
            found[record.name] = torch.empty(record.shape, dtype=dtype)
        on_read(record.bytes)
    return found


def _sharded(folder: Path, on_read: OnRead) -> dict[str, Any]:
    """The whole of a checkpoint that DCP wrote through transom."""
    source = Source(folder)
    facts = source.facts()
    flat: dict[str, Any] = {}
    for fqn, tensor in facts.tensors.items():
        chunks = [(chunk.offsets, source.get(chunk.stored, chunk.sizes)) for chunk in tensor.chunks]
        flat[fqn] = assemble(fqn, tensor.shape, getattr(torch, tensor.dtype), chunks)
        on_read(flat[fqn].nbytes)
    for fqn, stored in facts.values.items():
        flat[fqn] = value_of(fqn, bytes(staging.bytes_of(source.get(stored, (stored.bytes,)))))
        on_read(stored.bytes)
    return nested(flat, facts.paths)
