"""What checkpoints a directory holds, and whether they are whole. Needs no torch.

*Newest* means the highest step of the newest epoch: after a rollback, what an abandoned epoch saved at higher steps
comes after what the epoch in force saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from transomd.tce.epochs import newest_epoch
from transomd.tce.files import read_chunks
from transomd.tce.manifest import (
    MANIFEST,
    FileRecord,
    Part,
    StepManifest,
    parse_rank_manifest_name,
    parse_step_folder,
    read_rank_manifest,
    read_step_manifest,
)

__all__ = ["Checkpoint", "Damage", "damages", "list_checkpoints", "newest_epoch", "verify"]


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file of a checkpoint, or with ``tensor`` in it, whose ``bytes`` begin at ``offset``.

    ``unread``: it could not be looked at, so nothing is known of it.
    """

    text: str
    file: str = ""
    tensor: str = ""
    offset: int = 0
    bytes: int = 0
    unread: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.text}" if self.file else self.text


@dataclass(frozen=True)
class Checkpoint:
    """One step as one epoch saved it.

    ``complete``: its manifest is there and every file has its size; ``verify`` reads the bytes as well. ``problem``
    says what is missing otherwise. ``ranks`` is the world size (0: unknown), ``created`` seconds since 1970 (UTC).
    """

    step: int
    epoch: int
    complete: bool
    bytes: int
    ranks: int
    path: Path
    created: float
    problem: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """What checkpoints are ordered by, oldest first."""
        return self.epoch, self.step


def step_folders(directory: str | os.PathLike[str]) -> list[Path]:
    """The folders of checkpoints, whole or not, newest first; empty where the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [(parsed[1], parsed[0], name) for name in names if (parsed := parse_step_folder(name))]
    return [Path(directory) / name for _, _, name in sorted(found, reverse=True)]


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Every checkpoint in ``directory``, newest first, whole or not; sizes are looked at, bytes are not read.

    A directory that does not exist holds none. Raises OSError where it cannot be read.
    """
    found = (_look(folder) for folder in step_folders(directory))
    return [checkpoint for checkpoint in found if checkpoint]


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of the checkpoint in the folder ``path``; each problem names file and tensor. Empty: it is good.

    A folder that cannot be read is a problem too, not an error.
    """
    return [str(damage) for damage in damages(path)]


def damages(path: str | os.PathLike[str], on_read: Callable[[int], object] | None = None) -> list[Damage]:
    """Do what ``verify`` does; ``on_read`` is told how many bytes were read since it was told last."""
    folder = Path(path)
    try:
        manifest = read_step_manifest(folder)
    except FileNotFoundError:
        return [Damage("is not there: the checkpoint is incomplete", MANIFEST)]
    except (OSError, ValueError) as error:
        return [_damage(error)]
    problems: list[Damage] = []
    for entry in manifest.ranks:
        try:
            written = read_rank_manifest(folder, entry)
        except (OSError, ValueError) as error:
            problems.append(_damage(error))
            continue
        problems += [problem for part in written.parts for problem in _verify_files(folder, part, on_read)]
    return problems


def load_parts(folder: Path, manifest: StepManifest, names: Iterable[str]) -> list[Part]:
    """The named parts with their files; ValueError or OSError if a rank manifest is damaged or gone."""
    wanted = set(names)
    writers = {part.writer for part in manifest.parts if part.name in wanted}
    written = [read_rank_manifest(folder, entry) for entry in manifest.ranks if entry.rank in writers]
    return [part for rank in written for part in rank.parts if part.name in wanted]


def _look(folder: Path) -> Checkpoint | None:
    """What stands in one folder; None if it vanished meanwhile."""
    step, epoch = parse_step_folder(folder.name) or (0, 0)
    try:
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        created = folder.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        return Checkpoint(step, epoch, False, 0, 0, folder, 0.0, _told(error))
    if MANIFEST not in sizes:
        there = sum(parse_rank_manifest_name(name) is not None for name in sizes)
        problem = f"incomplete: {there} ranks have written, and {MANIFEST} is not there"
        return Checkpoint(step, epoch, False, sum(sizes.values()), 0, folder, created, problem)
    try:
        manifest = read_step_manifest(folder)
    except (OSError, ValueError) as error:
        return Checkpoint(step, epoch, False, sum(sizes.values()), 0, folder, created, _told(error))
    problem = next(_wrong_sizes(manifest, sizes), "")
    return Checkpoint(step, epoch, not problem, manifest.bytes, manifest.world_size, folder, manifest.created, problem)


def _wrong_sizes(manifest: StepManifest, sizes: dict[str, int]) -> Iterator[str]:
    expected = {entry.name: entry.bytes for entry in manifest.ranks}
    for part in manifest.parts:
        expected.update(part.files)
    for name, size in expected.items():
        if name not in sizes:
            yield f"{name}: is not there"
        elif sizes[name] != size:
            yield f"{name}: has {sizes[name]} bytes instead of {size}"


def _verify_files(folder: Path, part: Part, on_read: Callable[[int], object] | None) -> Iterator[Damage]:
    for file in part.files:
        try:
            problem = _verify_file(folder / file.name, file, on_read)
        except OSError as error:
            problem = _damage(error)
        if problem:
            yield problem


def _verify_file(path: Path, file: FileRecord, on_read: Callable[[int], object] | None) -> Damage | None:
    """Read one file; says the first thing that is wrong with it."""
    size = path.stat().st_size
    if size != file.bytes:
        return Damage(f"has {size} bytes instead of {file.bytes}", file.name)
    whole = xxh3_128()
    head = file.tensors[0].offset if file.tensors else file.bytes
    pieces = iter(read_chunks(path, [head, *(tensor.bytes for tensor in file.tensors)]))
    _hash_next(pieces, head, whole, on_read)
    for tensor in file.tensors:
        if _hash_next(pieces, tensor.bytes, whole, on_read) != tensor.xxh3_128:
            text = f"tensor {tensor.name} is damaged"
            return Damage(text, file.name, tensor.name, tensor.offset, tensor.bytes)
    return (
        None if whole.hexdigest() == file.xxh3_128 else Damage("is damaged outside its tensors", file.name, bytes=head)
    )


def _hash_next(
    pieces: Iterator[memoryview], size: int, whole: xxh3_128, on_read: Callable[[int], object] | None
) -> str:
    own = xxh3_128()
    while size > 0 and (piece := next(pieces, None)) is not None:
        own.update(piece)
        whole.update(piece)
        size -= len(piece)
        if on_read is not None:
            on_read(len(piece))
    return own.hexdigest()


def _damage(error: Exception) -> Damage:
    unread = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return Damage(_told(error), unread=unread)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error)
