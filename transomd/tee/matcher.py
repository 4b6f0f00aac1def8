"""Turns bytes of logs into evidence: fast over what is ordinary, bounded in time and memory over what is hostile."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from transomd.tee.catalogue import Catalogue, Signature, load
from transomd.tee.clean import MAX_LINE, NOBODY, Printer, decode, find_time, split_prefix
from transomd.tee.prefilter import compile_prefilter
from transomd.tee.tracebacks import HEADER, Traceback
from transomd.tee.types import MAX_TEXT, Chunk, Evidence
from transomd.words import Action, Blame, FailureClass, Role

MAX_DISTINCT = 2000
"""Most different pieces of evidence that one matcher keeps; repeats of a known one only raise its count."""

MAX_FILES = 20000
MAX_OPEN = 64
"""Most tracebacks that are put together at one time in one file."""

_EXPECTED = ("PY-NOFILE",)
"""Exceptions that a program may expect and make up for."""
_OF_MANY = ("PY-EXCEPTION", *_EXPECTED)
"""Signatures that stand for different faults: one that was made up for must not hide a later one."""
_OF_ANY = ("PY-GENERIC", *_OF_MANY)
"""Signatures of what no other knows: half a line says nothing then, for the other half might be known."""
_SHAPES = 8192
_LONGEST_SHAPE = 512
_BEFORE = 1024
_LAG_S = 120.0
"""A stamp of a live line that is further from now is of another time zone, or about another time."""
_STAMP = 240
_LOOK_BACK = 30
_DIGITS = b"0123456789."
_NUMBERS = re.compile(r"\d+|0x[0-9a-f]+")
EXCEPTION = Signature(
    id="PY-EXCEPTION",
    source="log",
    failure_class=FailureClass.USER_CODE,
    blame=Blame.PROGRAM,
    role=Role.ROOT,
    action=Action.STOP,
    regex="",
    anchors=(),
    note="A Python exception that ended a rank. On every rank alike or on one: the program's.",
)


class _Stream:
    """What is remembered about one file."""

    __slots__ = ("at", "cut", "lines", "number", "open")

    def __init__(self) -> None:
        self.lines = 0
        self.number = 0
        self.cut = False
        self.at: float | None = None
        self.open: dict[str, _Open] = {}


class _Open(NamedTuple):
    """A traceback that is being put together, who prints it, and when its first line was printed."""

    traceback: Traceback
    printer: Printer
    at: float | None


class Matcher:
    """Reads chunks of many files. One matcher serves one launch: evidence once seen is not told again, only counted.

    With ``live`` a line without a credible time stamp is taken to have been printed when it was read; otherwise it gets
    the time of the nearest line above it that has one. And what ends without an end of line was cut off by the end of
    its rank, where a file that a person hands in may merely lack it.
    """

    def __init__(self, catalogue: Catalogue | None = None, *, nodes: Collection[str] = (), live: bool = True) -> None:
        self._catalogue = catalogue or load()
        self._nodes = frozenset(nodes)
        self._live = live
        self._streams: dict[str, _Stream] = {}
        self._quiet: set[bytes] = set()
        self._seen: dict[tuple[object, ...], Evidence] = {}
        self._hits = compile_prefilter(self._catalogue.anchors | {HEADER})
        self.dropped = 0

    def feed(self, chunk: Chunk, now: float) -> list[Evidence]:
        """Return what is new in ``chunk``; ``now`` is the time at which it was read, in Unix seconds."""
        if chunk.fresh or chunk.file not in self._streams:
            if len(self._streams) >= MAX_FILES:
                self.dropped += 1
                return []
            self._streams[chunk.file] = _Stream()
        stream = self._streams[chunk.file]
        found = list(self._scan(chunk, stream, now))
        stream.lines += chunk.data.count(b"\n")
        return found

    def flush(self, now: float, quiet_s: float = 1.0) -> list[Evidence]:
        """Return tracebacks to which nothing was added for ``quiet_s`` seconds. Call it on every tick."""
        return [found for file in self._streams for found in self._close_old(file, now - quiet_s)]

    def finish(self) -> list[Evidence]:
        """Return every traceback that is still open; nothing more will come."""
        return [found for file in self._streams for found in self._close_old(file, float("inf"))]

    def evidence(self) -> list[Evidence]:
        """Return everything found so far, each once, with its count."""
        return list(self._seen.values())

    def _scan(self, chunk: Chunk, stream: _Stream, now: float) -> Iterator[Evidence]:
        shapes = chunk.data.translate(None, _DIGITS).split(b"\n")
        loud = self._loud(set(shapes))
        if not loud and not stream.open:
            return
        lines, looked_at = chunk.data.split(b"\n"), 0
        for index, shape in enumerate(shapes):
            if stream.open or shape in loud:
                stream.number = stream.lines + index + 1
                self._note_time(lines[max(looked_at, index - _LOOK_BACK) : index + 1], stream, now)
                looked_at = index + 1
                stream.cut = self._live and index + 1 == len(lines) and 0 < len(lines[index]) <= MAX_LINE
                for part in self._parts(lines[index]):
                    yield from self._line(part, chunk, stream, now)

    def _loud(self, shapes: set[bytes]) -> set[bytes]:
        """Return those of the lines, numbers taken out, that could match.

        Lines that differ only in numbers are looked at once: this is what makes an ordinary log cheap.
        """
        fresh = shapes - self._quiet
        if not fresh:
            return fresh
        loud = {one for one in fresh if self._hits.search(one)} if self._hits.search(b"\n".join(fresh)) else set()
        if len(self._quiet) > _SHAPES:
            self._quiet.clear()
        self._quiet.update(one for one in fresh - loud if len(one) <= _LONGEST_SHAPE)
        return loud

    def _parts(self, line: bytes) -> Iterator[bytes]:
        """Cut a line at carriage returns, and what is still too long around what could match."""
        if len(line) <= MAX_LINE and b"\r" not in line:
            yield line
            return
        bars = line.rstrip(b"\r").split(b"\r")
        for bar in bars:
            if len(bar) <= MAX_LINE:
                if bar is bars[-1] or self._hits.search(bar):
                    yield bar
            else:
                yield from self._windows(bar)

    def _windows(self, line: bytes) -> Iterator[bytes]:
        at = 0
        while hit := self._hits.search(line, at):
            start = max(at, hit.start() - _BEFORE)
            at = start + MAX_LINE
            yield line[start:at]

    def _note_time(self, lines: list[bytes], stream: _Stream, now: float) -> None:
        """Keep the time of the last line; when reading old files, that of the nearest line above which has one."""
        if self._live:
            own = _time(lines[-1], now)
            stream.at = own if own is not None and abs(own - now) < _LAG_S else now
            return
        for line in reversed(lines):
            if (own := _time(line, now)) is not None:
                stream.at = own
                return

    def _line(self, raw: bytes, chunk: Chunk, stream: _Stream, now: float) -> Iterator[Evidence]:
        printer, text = split_prefix(decode(raw), self._nodes)
        running = stream.open.get(printer.label)
        if running:
            if running.traceback.take(text, now, whole=not stream.cut) and not running.traceback.full:
                return
            if running.traceback.ended or running.traceback.full:
                yield from self._close(printer.label, chunk.file, stream)
        if text.endswith(HEADER) and len(stream.open) < MAX_OPEN:
            started = Traceback(stream.number, now, text)
            stream.open[printer.label] = _Open(started, _whole(printer, chunk), stream.at)
        elif found := self._catalogue.find(text):
            signature, match = found
            signature = _unsure(signature) if stream.cut else signature
            yield from self._keep(self._make(signature, match, text, _whole(printer, chunk), chunk.file, stream))

    def _make(
        self, signature: Signature, match: re.Match[str] | None, text: str, printer: Printer, file: str, stream: _Stream
    ) -> Evidence:
        groups = match.groupdict() if match else {}
        peer_node, peer_rank, rank = groups.get("peer_node"), groups.get("peer_rank"), groups.get("rank")
        return Evidence(
            source=signature.source,
            signature=signature.id,
            text=text[:MAX_TEXT],
            role=signature.role,
            failure_class=signature.failure_class,
            blame=signature.blame,
            action=signature.action,
            at=stream.at,
            node=groups.get("node") or printer.node,
            rank=int(rank) if rank else (None if groups.get("node") else printer.rank),
            peer_nodes=(peer_node,) if peer_node else (),
            peer_ranks=(int(peer_rank),) if peer_rank else (),
            file=file,
            line=stream.number,
        )

    def _keep(self, found: Evidence) -> Iterator[Evidence]:
        key = _key(found)
        if known := self._seen.get(key):
            self._seen[key] = replace(known, count=known.count + 1)
        elif len(self._seen) >= MAX_DISTINCT:
            self.dropped += 1
        else:
            self._seen[key] = found
            yield found

    def _close_old(self, file: str, before: float) -> Iterator[Evidence]:
        stream = self._streams[file]
        for label in [label for label, one in stream.open.items() if one.traceback.touched <= before]:
            yield from self._close(label, file, stream)

    def _close(self, label: str, file: str, stream: _Stream) -> Iterator[Evidence]:
        done, printer, at = stream.open.pop(label)
        if done.exceptions:
            signature, match = self._classify(done.exceptions)
            signature = _unsure(signature) if self._live and not done.whole else signature
            made = self._make(signature, match, done.text(), printer, file, stream)
            yield from self._keep(replace(made, line=done.line, at=at))

    def _classify(self, exceptions: list[str]) -> tuple[Signature, re.Match[str] | None]:
        """Class an exception by the inner text of its chain: first a known root cause, then a victim's words.

        What a program may expect and make up for is no cause of what it raises afterwards, and what fails only while
        another failure is dealt with is none of that.
        """
        hits = [hit for hit in map(self._catalogue.find, exceptions) if hit]
        found = [hit for hit in hits if hit[0].id not in ("PY-GENERIC", *_EXPECTED)]
        roots = [hit for hit in found if hit[0].role is Role.ROOT]
        if roots or found:
            return (roots or found)[0]
        last = self._catalogue.find(exceptions[-1])
        return last if last and last[0].id in _EXPECTED else (EXCEPTION, None)


def _unsure(signature: Signature) -> Signature:
    """What is left of a signature whose line, or whose chain of exceptions, was cut off by the end of its rank."""
    if signature.id not in _OF_ANY:
        return signature
    return replace(signature, role=Role.CONTEXT, blame=Blame.UNKNOWN, action=Action.RESTART)


def _time(line: bytes, now: float) -> float | None:
    return find_time(decode(line[:_STAMP]), now=now)


def _whole(printer: Printer, chunk: Chunk) -> Printer:
    if printer is NOBODY:
        return Printer(chunk.node, chunk.rank, "")
    return Printer(printer.node or chunk.node, printer.rank if printer.rank is not None else chunk.rank, printer.label)


def _key(found: Evidence) -> tuple[object, ...]:
    shape = _NUMBERS.sub("#", found.text.partition("\n")[0]) if found.signature in _OF_MANY else ""
    return (found.file, found.signature, found.node, found.rank, found.peer_nodes, found.peer_ranks, found.role, shape)
