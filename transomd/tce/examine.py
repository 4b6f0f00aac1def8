"""Reading what a rank is about to load before anything of it reaches the program: every byte, with a few threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_128

from transomd.tce.catalogue import load_parts
from transomd.tce.crew import together
from transomd.tce.files import PIECE
from transomd.tce.manifest import FileRecord, StepManifest

Range = tuple[str, int, int, str]
"""What is to be said of a range of a file if it is damaged, where it begins, how many bytes it has, their digest."""


def problems(folder: Path, manifest: StepManifest, names: Iterable[str]) -> list[str]:
    """What is wrong with the files of the named parts; each problem names file and tensor.

    Raises ValueError or OSError if a rank manifest is damaged or gone.
    """
    files = [file for part in load_parts(folder, manifest, names) for file in part.files]
    return [f"{file.name}: {told}" for file in files for told in _wrong(folder / file.name, file)]


def _wrong(path: Path, file: FileRecord) -> Iterator[str]:
    """What is wrong with one file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        yield str(error.strerror)
        return
    try:
        size = os.fstat(descriptor).st_size
        if size != file.bytes:
            yield f"has {size} bytes instead of {file.bytes}"
        else:
            yield from together(_ranges(file), lambda ranges: _damaged(descriptor, ranges))
    except OSError as error:
        yield str(error.strerror)
    finally:
        os.close(descriptor)


def _ranges(file: FileRecord) -> list[Range]:
    """What covers the file, each byte once, the longest first; all of it where its head has no digest of its own."""
    head = file.tensors[0].offset if file.tensors else 0
    if not file.head_xxh3_128 or head + sum(tensor.bytes for tensor in file.tensors) != file.bytes:
        return [("is damaged", 0, file.bytes, file.xxh3_128)]
    tensors = [(f"tensor {each.name} is damaged", each.offset, each.bytes, each.xxh3_128) for each in file.tensors]
    rest = ("is damaged outside its tensors", 0, head, file.head_xxh3_128)
    return sorted([rest, *tensors], key=lambda range_: -range_[2])


def _damaged(descriptor: int, ranges: Iterator[Range]) -> Iterator[str]:
    """What is to be said of the ranges whose bytes do not match. Raises OSError."""
    buffer = memoryview(bytearray(PIECE))
    for message, at, size, told in ranges:
        if _digest(descriptor, at, size, buffer) != told:
            yield message


def _digest(descriptor: int, at: int, size: int, buffer: memoryview) -> str:
    """The digest of a range; of less if the file ends before."""
    own, end = xxh3_128(), at + size
    while at < end and (count := os.preadv(descriptor, [buffer[: end - at]], at)):
        own.update(buffer[:count])
        at += count
    return own.hexdigest()
