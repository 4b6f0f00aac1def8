"""Reads log files and says what failed: the same code as in a running job, with no daemon and no job."""

from __future__ import annotations

import gzip
import re
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from transomd.errors import UsageError
from transomd.tee.matcher import Matcher
from transomd.tee.tail import LONGEST_WAIT, Owner
from transomd.tee.types import Chunk, Evidence, Verdict
from transomd.tee.verdict import fuse
from transomd.tee.wire import plain

BLOCK = 4 << 20
"""Bytes that are read at a time."""

STDIN = "-"
_LOOKED_AT = 8192
"""Bytes of a file in which a zero byte says that it is no text, as git and grep judge."""
_GZIP = b"\x1f\x8b"
_RANK = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,6})(?!\d)")
_KERNEL = r"(?:dmesg|kern|kernel|journal|journalctl|messages|syslog)"
_NAME = r"[a-z][a-z0-9-]*\d"
_NODE = re.compile(rf"^(?:{_KERNEL}[-_.](?P<after>{_NAME})|(?P<before>{_NAME})[-_.]{_KERNEL})(?![a-z0-9])")


@dataclass
class Read:
    """What was read of one file; ``binary``: it is no text, so nothing in it was understood."""

    path: str
    size: int = 0
    lines: int = 0
    binary: bool = False

    def add(self, data: bytes) -> None:
        """Count one more block."""
        self.binary = self.binary or (not self.size and b"\0" in data[:_LOOKED_AT])
        self.size += len(data)
        self.lines += data.count(b"\n") + (not data.endswith(b"\n"))


def diagnose(paths: Sequence[str], *, now: float | None = None, read: list[Read] | None = None) -> Verdict:
    """Return the verdict on what these log files show; ``-`` is standard input, gzip is undone.

    ``read`` gets what was read of each. Raises UsageError naming the first file that cannot be read.
    """
    clock = time.time() if now is None else now
    matcher = Matcher(live=False)
    for path in dict.fromkeys(paths):
        of = Read(path)
        for chunk in _chunks(path):
            of.add(chunk.data)
            matcher.feed(chunk, clock)
        if read is not None:
            read.append(of)
    matcher.finish()
    ranks = [owner.rank for owner in map(owner_of, paths) if owner.rank is not None]
    return fuse(matcher.evidence(), nodes=(), ranks_by_node={"": ranks} if ranks else {})


def owner_of(path: str) -> Owner:
    """Read the rank (``rank-00003.log``) or, for kernel logs, the node (``dmesg-n2.txt``) out of a file's name."""
    name = Path(path).name.lower()
    rank, node = _RANK.search(name), _NODE.search(name)
    found = (node["after"] or node["before"]) if node else ""
    return Owner(node=found, rank=int(rank[1]) if rank else None)


def _chunks(path: str) -> Iterator[Chunk]:
    owner, fresh = owner_of(path), True
    try:
        with _opened(path) as stream:
            for data in _blocks(stream):
                yield Chunk(file=path, data=data, node=owner.node, rank=owner.rank, fresh=fresh)
                fresh = False
    except (OSError, EOFError, zlib.error) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"diagnose {path}: {cause}", hint=f"ls -l {Path(path).parent}; - is standard input") from error


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or standard input; what is packed is unpacked, whatever its name."""
    with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as raw:
        if raw.peek(2)[:2] == _GZIP:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast("IO[bytes]", unpacked)
        else:
            yield raw


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield whole lines, many at a time; a line longer than a chunk comes in pieces."""
    rest = b""
    while data := stream.read(BLOCK):
        data = rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > LONGEST_WAIT:
            end = len(data)
        rest = data[end:]
        if end:
            yield data[:end]
    if rest:
        yield rest


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as ``transom diagnose --json`` prints it; the keys are part of the interface."""
    return {
        "class": str(verdict.failure_class),
        "blame": str(verdict.blame),
        "nodes": list(verdict.nodes),
        "ranks": list(verdict.ranks),
        "action": str(verdict.action),
        "confidence": str(verdict.confidence),
        "evidence": [_evidence(one) for one in verdict.evidence],
        "summary": plain(verdict.summary, 2000),
    }


def _evidence(one: Evidence) -> dict[str, Any]:
    return {
        "file": plain(one.file, 1024),
        "line": one.line,
        "text": plain(one.text),
        "signature": one.signature,
        "role": str(one.role),
    }
