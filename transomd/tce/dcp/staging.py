"""DCP's bytes to and from storage: one file a rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from xxhash import xxh3_128

from transomd.tce.dcp.facts import DAMAGED, DamagedError, Stored
from transomd.tce.errors import CheckpointError
from transomd.tce.files import CHUNK, digest, write_file
from transomd.tce.layout import Layout
from transomd.tce.manifest import FileRecord
from transomd.tce.payload import on_host, plan

VALUE = "a value as torch.save wrote it"


def put(
    folder: Path,
    name: str,
    like: Mapping[str, torch.Tensor],
    source: Callable[[str], torch.Tensor],
    values: Container[str],
) -> FileRecord:
    """Write NAME.safetensors durably (its name once the caller fsyncs the folder); raises OSError.

    ``like`` has the type and shape of each tensor (on the meta device); ``source`` brings one when its turn comes,
    so that no more than one is held in memory; ``values`` names those that are what torch.save wrote.
    CheckpointError if one is not what was announced.
    """
    payload = plan(name, (), Layout({}, values=dict(like)))
    whole = xxh3_128()
    digests: dict[str, str] = {}

    def chunks() -> Iterator[bytes | memoryview]:
        whole.update(payload.header)
        yield payload.header
        for record in payload.records:
            tensor = on_host(expected(source(record.name), like[record.name], record.name))
            view = bytes_of(tensor)
            digests[record.name] = digest(view)
            whole.update(view)
            yield view

    file = f"{name}.safetensors"
    write_file(folder / file, payload.tensor_bytes, chunks())
    records = tuple(
        replace(record, xxh3_128=digests[record.name], note=VALUE if record.name in values else record.note)
        for record in payload.records
    )
    return FileRecord(file, payload.tensor_bytes, whole.hexdigest(), records, digest(payload.header))


def check(folder: Path, stored: Stored) -> None:
    """Read the bytes of a tensor; DamagedError names file and tensor if they are not what was written."""
    buffer = memoryview(bytearray(min(CHUNK, stored.bytes)))
    whole = xxh3_128()
    for piece in _pieces(folder, stored, buffer):
        whole.update(piece)
    if whole.hexdigest() != stored.xxh3_128:
        raise _damaged(folder, stored)


def get(folder: Path, stored: Stored, sizes: tuple[int, ...]) -> torch.Tensor:
    """A new tensor with the bytes of the file, verified; DamagedError if they are damaged."""
    tensor = torch.empty(sizes, dtype=getattr(torch, stored.dtype))
    if tensor.nbytes != stored.bytes:
        raise _damaged(folder, stored)
    view = bytes_of(tensor)
    done = sum(len(piece) for piece in _pieces(folder, stored, view))
    if done != stored.bytes or digest(view) != stored.xxh3_128:
        raise _damaged(folder, stored)
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor, of whatever type; the tensor lives as long as the view."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _pieces(folder: Path, stored: Stored, buffer: memoryview) -> Iterator[memoryview]:
    """Read the bytes into ``buffer``, from its start again when it is full; yields each piece. A short file ends it."""
    left, at = stored.bytes, 0
    try:
        with open(folder / stored.file, "rb", buffering=0) as file:
            file.seek(stored.offset)
            while left and (count := file.readinto(buffer[at : at + min(CHUNK, left)])):
                yield buffer[at : at + count]
                left -= count
                at = (at + count) % len(buffer)
    except OSError as error:
        raise DamagedError(f"{folder / stored.file}: tensor {stored.name} {DAMAGED}: {error.strerror}") from error


def expected(tensor: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, detached; CheckpointError if it is not what was announced."""
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise CheckpointError(
            f"{name} was announced as {like.dtype} {list(like.shape)} and came as {tensor.dtype} {list(tensor.shape)}",
            hint="the planner's resolve_data must bring the same each time it is asked",
        )
    return tensor.detach()


def _damaged(folder: Path, stored: Stored) -> DamagedError:
    where = f"bytes {stored.offset} to {stored.offset + stored.bytes - 1}"
    return DamagedError(
        f"{folder / stored.file}: tensor {stored.name} {DAMAGED} ({where})",
        hint=f"transom ckpt verify {folder.parent}; load an older step, or use load_newest",
    )
