"""A part as it will lie on the disk, wherever its bytes are now: in tensors of the program, or in a slot of memory.

Both ways to the disk (``save`` without a memory tier, and the keeper) write images, so there is one writer. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128

from transomd.tce.files import write_file
from transomd.tce.manifest import FileRecord, Part, TensorRecord

_CHUNK = 4 << 20
Piece = bytes | memoryview
Pieces = Callable[[], Iterable[Piece]]


@dataclass(frozen=True)
class FileImage:
    """One file to be. ``pieces`` yields what precedes the tensors, then each tensor in the order of ``records``.

    ``known``: its digests, where somebody has taken them already; else they are taken while it is written. ``whole``:
    all of its bytes, where they lie in one piece.
    """

    name: str
    bytes: int
    records: tuple[TensorRecord, ...]
    pieces: Pieces
    known: FileRecord | None = None
    whole: memoryview | None = None


@dataclass(frozen=True)
class PartImage:
    """One part to be: who loads it, its top-level keys and its files."""

    name: str
    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    files: tuple[FileImage, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.bytes for file in self.files)


def write_part(folder: Path, part: PartImage) -> Part:
    """Write the files of a part durably (their names once the caller fsyncs the folder); raises OSError."""
    return Part(part.name, part.ranks, part.keys, tuple(_write(folder, file) for file in part.files))


def digest_file(file: FileImage) -> FileRecord:
    """Take the digests of a file that is not written yet."""
    digests = _Digests(file)
    for _ in digests.chunks():
        pass
    return digests.record()


def _write(folder: Path, file: FileImage) -> FileRecord:
    if file.known is not None:
        write_file(folder / file.name, file.bytes, file.pieces() if file.whole is None else [file.whole])
        return file.known
    digests = _Digests(file)
    write_file(folder / file.name, file.bytes, digests.chunks())
    return digests.record()


class _Digests:
    """The digests of a file and of its tensors, taken as its bytes pass by."""

    def __init__(self, file: FileImage) -> None:
        self._file = file
        self._whole = xxh3_128()
        self._pieces: list[str] = []

    def chunks(self) -> Iterator[memoryview]:
        """The bytes, in pieces that stay in the processor's cache from one use of them to the next."""
        for piece in self._file.pieces():
            own, view = xxh3_128(), memoryview(piece).cast("B")
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                own.update(chunk)
                self._whole.update(chunk)
                yield chunk
            self._pieces.append(own.hexdigest())

    def record(self) -> FileRecord:
        """What the manifest says of the file, once all chunks have passed."""
        taken = zip(self._file.records, self._pieces[1:], strict=True)
        records = tuple(replace(record, xxh3_128=digest) for record, digest in taken)
        head = self._pieces[0] if records else ""
        return FileRecord(self._file.name, self._file.bytes, self._whole.hexdigest(), records, head)
