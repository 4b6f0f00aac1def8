"""Turns bytes of logs into evidence: fast over what is ordinary, bounded in time and memory over what is hostile."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from transomd.tee.catalogue import Catalogue, Signature, load
from transomd.tee.clean import MAX_LINE, NOBODY, Printer, decode, find_time, split_prefix
from transomd.tee.tracebacks import HEADER, Traceback
from transomd.tee.types import MAX_TEXT, Chunk, Evidence
from transomd.words import Action, Blame, FailureClass, Role

MAX_DISTINCT = 2000
"""Most different pieces of evidence that one matcher keeps; repeats of a known one only raise its count."""

MAX_FILES = 20000
MAX_OPEN = 64
"""Most tracebacks that are put together at one time in one file."""

_TEMPLATES = 4096
_BEFORE = 1024
_LOOK_BACK = 4096
_DIGITS = b"0123456789."
_BREAK = re.compile(rb"[\r\n]")
_HEADER = HEADER.encode()
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

    __slots__ = ("at", "line", "open", "opened_line")

    def __init__(self) -> None:
        self.line = 0
        self.at: float | None = None
        self.open: dict[str, tuple[Traceback, Printer, float | None]] = {}
        self.opened_line = 0


class Matcher:
    """Reads chunks of many files. One matcher serves one launch: evidence once seen is not told again, only counted.

    With ``live`` a line without a time stamp is taken to have been printed when it was read; otherwise it gets the time of the
    nearest line above it that has one.
    """

    def __init__(self, catalogue: Catalogue | None = None, *, nodes: Collection[str] = (), live: bool = True) -> None:
        self._catalogue = catalogue or load()
        self._nodes = frozenset(nodes)
        self._live = live
        self._streams: dict[str, _Stream] = {}
        self._quiet: set[bytes] = set()
        self._seen: dict[tuple[object, ...], Evidence] = {}
        pattern = self._catalogue.prefilter.pattern
        self._hits = re.compile(pattern + b"|" + re.escape(_HEADER))
        self.dropped = 0

    def feed(self, chunk: Chunk, now: float) -> list[Evidence]:
        """Return what is new in ``chunk``; ``now`` is the time at which it was read, in Unix seconds."""
        if chunk.fresh or chunk.file not in self._streams:
            if len(self._streams) >= MAX_FILES:
                self.dropped += 1
                return []
            self._streams[chunk.file] = _Stream()
        stream = self._streams[chunk.file]
        if not stream.open and self._ordinary(chunk.data):
            stream.line += chunk.data.count(b"\n")
            return []
        return list(self._scan(chunk, stream, now))

    def flush(self, now: float, quiet_s: float = 1.0) -> list[Evidence]:
        """Return tracebacks to which nothing was added for ``quiet_s`` seconds. Call it on every tick."""
        return [found for file in self._streams for found in self._close_old(file, now - quiet_s)]

    def finish(self) -> list[Evidence]:
        """Return every traceback that is still open; nothing more will come."""
        return [found for file in self._streams for found in self._close_old(file, float("inf"))]

    def evidence(self) -> list[Evidence]:
        """Return everything found so far, each once, with its count."""
        return list(self._seen.values())

    def _ordinary(self, data: bytes) -> bool:
        """Whether no line can match: lines that differ only in their numbers are looked at once."""
        fresh = set(data.translate(None, _DIGITS).split(b"\n")) - self._quiet
        if not fresh:
            return True
        if self._hits.search(b"\n".join(fresh)):
            return False
        if len(self._quiet) + len(fresh) <= _TEMPLATES:
            self._quiet.update(one for one in fresh if len(one) <= 512)
        return True

    def _scan(self, chunk: Chunk, stream: _Stream, now: float) -> Iterator[Evidence]:
        data, at, first = chunk.data, 0, stream.line
        counted = 0
        while at < len(data):
            start, end, after = self._next_line(data, at, bool(stream.open))
            if start < 0:
                break
            stream.line += data.count(b"\n", counted, start)
            counted = start
            self._note_time(data, at, start, end, stream, now)
            yield from self._line(data[start:end], chunk, stream, now)
            at = after
        stream.line = first + data.count(b"\n")

    def _next_line(self, data: bytes, at: int, every: bool) -> tuple[int, int, int]:
        """Return where the next line worth a look starts and ends, and where to go on; -1 if there is none."""
        if every:
            start = at
        else:
            hit = self._hits.search(data, at)
            if not hit:
                return -1, -1, -1
            begin = max(at, hit.start() - _BEFORE)
            start = max(begin, data.rfind(b"\n", begin, hit.start()) + 1, data.rfind(b"\r", begin, hit.start()) + 1)
        broken = _BREAK.search(data, start, start + MAX_LINE)
        end = broken.start() if broken else min(len(data), start + MAX_LINE)
        return start, end, end + 1 if broken else end

    def _note_time(self, data: bytes, at: int, start: int, end: int, stream: _Stream, now: float) -> None:
        """Keep the newest time stamp at or above the line."""
        own = find_time(decode(data[start : min(end, start + 240)]), now=now)
        if own is None and not self._live:
            above = data[max(at, start - _LOOK_BACK) : start].split(b"\n")[-2:-30:-1]
            own = next((found for line in above if (found := find_time(decode(line[:240]), now=now)) is not None), None)
        if self._live:
            stream.at = own if own is not None and abs(own - now) < 86400 else now
        elif own is not None:
            stream.at = own

    def _line(self, raw: bytes, chunk: Chunk, stream: _Stream, now: float) -> Iterator[Evidence]:
        printer, text = split_prefix(decode(raw), self._nodes)
        running = stream.open.get(printer.label)
        if running:
            if running[0].take(text, now) and not running[0].full:
                return
            if running[0].ended or running[0].full:
                yield from self._close(printer.label, chunk.file, stream, chunk.node, chunk.rank)
        if text.endswith(HEADER) and len(stream.open) < MAX_OPEN:
            opened = Traceback(stream.line + 1, now)
            stream.open[printer.label] = (opened, _whole(printer, chunk), stream.at)
            return
        if found := self._catalogue.find(text):
            signature, match = found
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
            line=stream.line + 1,
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
        for label in [label for label, (one, _, _) in stream.open.items() if one.touched <= before]:
            yield from self._close(label, file, stream)

    def _close(
        self, label: str, file: str, stream: _Stream, node: str = "", rank: int | None = None
    ) -> Iterator[Evidence]:
        done, printer, at = stream.open.pop(label)
        if not done.exceptions:
            return
        signature, match = self._classify(done.exceptions)
        made = self._make(signature, match, done.text(), printer, file, stream)
        yield from self._keep(replace(made, line=done.line, at=at))

    def _classify(self, exceptions: list[str]) -> tuple[Signature, re.Match[str] | None]:
        """Class an exception by the inner text of its chain: a root cause that is known first, then whether it is a victim's."""
        found = [hit for hit in map(self._catalogue.find, exceptions) if hit and hit[0].id != "PY-GENERIC"]
        roots = [hit for hit in found if hit[0].role is Role.ROOT]
        if roots:
            return roots[0]
        return found[0] if found else (EXCEPTION, None)


def _whole(printer: Printer, chunk: Chunk) -> Printer:
    if printer is NOBODY:
        return Printer(chunk.node, chunk.rank, "")
    return Printer(printer.node or chunk.node, printer.rank if printer.rank is not None else chunk.rank, printer.label)


def _key(found: Evidence) -> tuple[object, ...]:
    shape = _NUMBERS.sub("#", found.text.partition("\n")[0]) if found.signature == "PY-EXCEPTION" else ""
    return (found.file, found.signature, found.node, found.rank, found.peer_nodes, found.peer_ranks, found.role, shape)
