"""Reading a job's rank logs (``logs/e<epoch>/rank-<rank>.log`` in its run folder) as they grow, as the calling user.

The files are written by the user's program: only regular files are opened, and never waited for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transomd.errors import NotFoundError, RefusedError

CHUNK = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is given as it is."""

_EPOCH = re.compile(r"e(\d{1,9})")
_RANK = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True, order=True)
class LogFile:
    """One rank's log of one epoch."""

    epoch: int
    rank: int
    path: Path


def log_files(run_dir: Path, *, epoch: int | None = None, rank: int | None = None) -> list[LogFile]:
    """Return the logs there are, by epoch and rank. Raises NotFoundError or RefusedError for the run folder."""
    try:
        epochs = [
            (int(found[1]), entry) for entry in os.scandir(run_dir / "logs") if (found := _EPOCH.fullmatch(entry.name))
        ]
    except FileNotFoundError:
        hint = "it is on a file system that this machine may not have; look from a login node of the cluster"
        raise NotFoundError(f"reading the logs in {run_dir}: there is no such folder", hint=hint) from None
    except PermissionError:
        hint = "only the job's owner may read its logs; transom status shows what transom knows"
        raise RefusedError(f"reading the logs in {run_dir}: permission denied", hint=hint) from None
    wanted = [(number, entry) for number, entry in epochs if epoch is None or number == epoch]
    return sorted(file for number, entry in wanted for file in _ranks(number, Path(entry.path), rank))


def _ranks(epoch: int, folder: Path, rank: int | None) -> Iterator[LogFile]:
    for entry in os.scandir(folder):
        found = _RANK.fullmatch(entry.name)
        if found and rank in (None, int(found[1])) and entry.is_file(follow_symlinks=False):
            yield LogFile(epoch, int(found[1]), Path(entry.path))


class Tail:
    """One growing file: complete lines as they come; a file that shrank is read from its start again."""

    def __init__(self, path: Path, *, last_lines: int | None = None) -> None:
        self.path = path
        self._rest = b""
        self._offset = 0 if last_lines is None else _start_of_last(path, last_lines)

    def lines(self) -> Iterator[str]:
        """Yield the complete lines that were added since the last call."""
        try:
            descriptor = _open(self.path)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size < self._offset:
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while chunk := file.read(CHUNK):
                self._offset += len(chunk)
                yield from self._split(chunk)

    def rest(self) -> str | None:
        """Return the line that has no end yet, once; None without one."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace") if rest else None

    def _split(self, chunk: bytes) -> Iterator[str]:
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        for line in whole:
            yield line.decode("utf-8", "replace")


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


def _start_of_last(path: Path, lines: int) -> int:
    """Return the offset at which the last ``lines`` lines of a file begin, read from its end."""
    try:
        descriptor = _open(path)
    except OSError:
        return 0
    with open(descriptor, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        tail, wanted = b"", lines + 1
        while position > 0 and tail.count(b"\n") < wanted and len(tail) < 64 * CHUNK:
            step = min(CHUNK, position)
            position -= step
            file.seek(position)
            tail = file.read(step) + tail
        kept = tail.split(b"\n")[-wanted:] if tail.endswith(b"\n") else tail.split(b"\n")[-lines:]
        return position + len(tail) - len(b"\n".join(kept)) if lines else position + len(tail)
