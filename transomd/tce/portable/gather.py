"""A checkpoint as one nested state of tensors and plain values, whoever wrote it and on however many ranks."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transomd.tce.catalogue import load_parts
from transomd.tce.dcp import staging
from transomd.tce.dcp.facts import DamagedError, written_by_dcp
from transomd.tce.dcp.source import Source
from transomd.tce.errors import CheckpointError
from transomd.tce.files import digest
from transomd.tce.joined import check_whole, join
from transomd.tce.layout import Layout, put_together
from transomd.tce.manifest import FileRecord, Part, StepManifest, read_step_manifest
from transomd.tce.payload import read_layout
from transomd.tce.portable.nest import assemble, leaves, nested, value_of
from transomd.tce.portable.shares import whole_tensors

OnRead = Callable[[int], object]


@dataclass(frozen=True)
class Gathered:
    """A state, and the top-level keys in it that belong to one rank of several, while the others' are left out."""

    state: dict[str, Any]
    of_one_rank: tuple[str, ...] = ()


def gather(folder: Path, *, rank: int = 0, own: bool = False, on_read: OnRead = lambda count: None) -> Gathered:
    """Read the checkpoint in ``folder``, every byte verified; ``on_read`` is told how many bytes were read.

    Where ranks had keys of their own, those of ``rank`` are taken; DTensors are made whole of what all ranks wrote.
    Tensors are mapped from the file, and numpy arrays (and b"") come as tensors; but with ``own``, for a program to go
    on with, all is as it was, and copied.
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
    opened = _Opened(folder, manifest, on_read)
    mine = [part.name for part in manifest.parts if rank in part.ranks]
    layout, names = join([opened.layout(name) for name in mine])
    check_whole(layout, layout.tree)
    tensors = whole_tensors(layout, opened.all() if layout.shards else [])
    for name in names.keys() - tensors.keys():
        tensor = opened.tensor(mine[names[name][0]], names[name][1])
        # A mapping would end with the file, which retention may remove while the program goes on.
        tensors[name] = tensor.clone() if own else tensor
    if not own:
        # Arrays are tensors in the file and stay so: torch.load(weights_only=True) would refuse them, and empty bytes.
        layout = replace(layout, arrays={})
    state = put_together(layout, list(layout.tree), tensors.__getitem__)
    alone = {part.name for part in manifest.parts if len(part.ranks) < manifest.world_size}
    keys = [key for name in mine if name in alone for key in _own_keys(opened.layout(name))]
    return Gathered(state, tuple(keys))


def _own_keys(layout: Layout) -> list[str]:
    """The keys of which there is more than shares of DTensors, which are made whole."""
    tensors = {path[0] for path, name in layout.tensors.items() if name not in layout.shards}
    values = {key for key, node in layout.tree.items() if any(value is not None for _, value in leaves(node, ()))}
    return [key for key in layout.tree if key in tensors | values]


class _Opened:
    """The parts of a checkpoint, each read when it is asked for. Raises DamagedError."""

    def __init__(self, folder: Path, manifest: StepManifest, on_read: OnRead) -> None:
        self._folder = folder
        self._manifest = manifest
        self._on_read = on_read
        self._parts: dict[str, Part] = {}
        self._layouts: dict[str, Layout] = {}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}

    def all(self) -> list[tuple[Layout, Callable[[str], torch.Tensor]]]:
        """Every part, and how its tensors are read."""
        return [(self.layout(part.name), partial(self.tensor, part.name)) for part in self._manifest.parts]

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            self._parts[name] = load_parts(self._folder, self._manifest, {name})[0]
        return self._parts[name]

    def layout(self, name: str) -> Layout:
        """What is no tensor of a part."""
        if name not in self._layouts:
            try:
                self._layouts[name] = read_layout(self._folder, self._part(name))
            except CheckpointError as error:
                raise DamagedError(str(error), hint=f"transom ckpt verify {self._folder.parent}") from error
        return self._layouts[name]

    def tensor(self, part: str, name: str) -> torch.Tensor:
        """A tensor, mapped from the file, all of which is verified."""
        if part not in self._tensors:
            files = (_mapped(self._folder, file, self._on_read) for file in self._part(part).files)
            self._tensors[part] = {each: tensor for file in files for each, tensor in file.items()}
        return self._tensors[part][name]


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
