"""Follows many log files in one directory as they grow: by inode, without following links, a bounded amount a poll."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from transomd.tee.types import Chunk

CHUNK = 1 << 20
"""Bytes that are read from one file at a time."""

LONGEST_WAIT = 64 << 10
"""Bytes of an unfinished line that are waited for; a longer one is handed on in pieces."""

MAX_FILES = 20000
_RANK = re.compile(r"rank-(\d{1,7})\.log")


class Owner(NamedTuple):
    """Who writes a file, as far as its name says."""

    node: str = ""
    rank: int | None = None


def rank_of_name(name: str) -> Owner | None:
    """Read ``rank-00003.log``; None for a file of another kind."""
    match = _RANK.fullmatch(name)
    return Owner(rank=int(match[1])) if match else None


class _File:
    __slots__ = ("fresh", "inode", "offset", "owner")

    def __init__(self, inode: tuple[int, int], owner: Owner) -> None:
        self.inode = inode
        self.owner = owner
        self.offset = 0
        self.fresh = True


class Tailer:
    """Reads what is new in the files of a directory whose names ``owner_of`` knows (it returns None for the others).

    Every poll starts with the file at which the last one ran out of budget, so that one busy rank starves nobody.
    A directory or file that cannot be read now is tried again on the next poll; ``errors`` says what was in the way.
    """

    def __init__(self, directory: Path, owner_of: Callable[[str], Owner | None] = rank_of_name) -> None:
        self._directory = directory
        self._owner_of = owner_of
        self._files: dict[str, _File] = {}
        self._first = ""
        self.errors: dict[str, str] = {}

    @property
    def blind(self) -> str:
        """Why nothing at all could be read at the last poll; empty where anything could."""
        if str(self._directory) in self.errors:
            return self.errors[str(self._directory)]
        return next(iter(self.errors.values())) if self._files and self._files.keys() <= self.errors.keys() else ""

    def poll(self, budget: int = 16 * CHUNK, *, final: bool = False) -> Iterator[Chunk]:
        """Yield at most about ``budget`` bytes of what is new, as whole lines; with ``final`` unfinished lines too."""
        self.errors.clear()
        for name in self._turn(self._names()):
            while budget > 0:
                chunk = self._read(name, final)
                if chunk is None:
                    break
                budget -= len(chunk.data)
                yield chunk
            if budget <= 0:
                self._first = name
                return
        self._first = ""

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._directory) as entries:
                return sorted(entry.name for entry in entries if self._known(entry.name))
        except OSError as error:
            self.errors[str(self._directory)] = error.strerror or str(error)
            return []

    def _known(self, name: str) -> bool:
        return name in self._files or (len(self._files) < MAX_FILES and self._owner_of(name) is not None)

    def _turn(self, names: list[str]) -> list[str]:
        return [name for name in names if name >= self._first] + [name for name in names if name < self._first]

    def _read(self, name: str, final: bool) -> Chunk | None:
        try:
            handle = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.errors[name] = error.strerror or str(error)
            return None
        try:
            return self._read_open(handle, name, final)
        except OSError as error:
            self.errors[name] = error.strerror or str(error)
            return None
        finally:
            os.close(handle)

    def _read_open(self, handle: int, name: str, final: bool) -> Chunk | None:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            self.errors[name] = "not a regular file"
            return None
        file = self._file(name, status)
        if status.st_size <= file.offset:
            return None
        data = _whole_lines(os.pread(handle, CHUNK, file.offset), final)
        if not data:
            return None
        file.offset += len(data)
        fresh, file.fresh = file.fresh, False
        return Chunk(file=name, data=data, node=file.owner.node, rank=file.owner.rank, fresh=fresh)

    def _file(self, name: str, status: os.stat_result) -> _File:
        inode = (status.st_dev, status.st_ino)
        file = self._files.get(name)
        if file is None or file.inode != inode or status.st_size < file.offset:
            file = self._files[name] = _File(inode, self._owner_of(name) or Owner())
        return file


def _whole_lines(data: bytes, final: bool) -> bytes:
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if final or len(data) - end > LONGEST_WAIT:
        return data
    return data[:end]
