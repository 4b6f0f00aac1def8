"""Puts Python tracebacks together, line by line and per printer, out of a log in which many ranks write at once."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LINES = 500
"""Lines that one traceback may be long before it is given up."""

HEADER = "Traceback (most recent call last):"
_OF_GROUP = "Exception Group"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w*(?:: .*|:)?$")
_CHAIN = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_OF_ANOTHER = "-- Process "
"""What follows is the traceback of another process, in the words of the exception that tells of its end."""
_GROUP = re.compile(r"^\s*(?:\+[-+ \d]*$|\+ |\| ?)")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]{1,300})", line \d+')
_LONG_PATH = re.compile(r'"[^"]+(/[^"]{20,50})"(?=, line)')
_ELSEWHERE = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")


class _Frame(NamedTuple):
    own: bool
    lines: list[str]


class Traceback:
    """One traceback, with the ones chained to it, while its lines come in.

    ``whole``: its last exception line has come to its end, and no further one of the chain is announced.
    """

    __slots__ = ("_frames", "_grouped", "_inside", "_lines", "_wrapped", "exceptions", "line", "touched", "whole")

    def __init__(self, line: int, touched: float, header: str = HEADER) -> None:
        self.line = line
        self.touched = touched
        self.exceptions: list[str] = []
        self.whole = False
        self._frames: list[_Frame] = []
        self._inside = True
        self._grouped = _OF_GROUP in header
        self._wrapped = False
        self._lines = 0

    def take(self, text: str, touched: float, *, whole: bool = True) -> bool:
        """Take the printer's next line, without prefix. False when the line is not part of the traceback any more.

        ``whole`` is false for a line that has no end.
        """
        self._lines += 1
        self.touched = touched
        if text == HEADER and self.whole and not self._grouped:
            return False  # nothing announced it: it is another process's, in the same file
        if text.endswith(HEADER):
            self._grouped = self._grouped or _OF_GROUP in text
            self._inside, self.whole, self._frames = True, False, []
            return True
        if self._grouped:
            text = _GROUP.sub("", text)
        return self._take_inside(text, whole) if self._inside else self._take_after(text)

    @property
    def full(self) -> bool:
        """Whether it is too long to be one."""
        return self._lines > MAX_LINES

    def _take_inside(self, text: str, whole: bool) -> bool:
        if not text or text[0] == " ":
            self._keep_frame(text)
            return True
        if not _EXCEPTION.match(text):
            return False
        outer = self.exceptions[:-1] if self._wrapped else self.exceptions
        self.exceptions, self._wrapped = [*outer[-7:], text], False
        self._inside, self.whole = False, whole
        return True

    def _take_after(self, text: str) -> bool:
        if text.startswith((*_CHAIN, _OF_ANOTHER)):
            self.whole, self._wrapped = False, text.startswith(_OF_ANOTHER)
            return True
        return not text

    @property
    def ended(self) -> bool:
        """Whether its exception line has come."""
        return not self._inside

    def _keep_frame(self, text: str) -> None:
        if _FRAME.match(text):
            own = not any(part in text for part in _ELSEWHERE)
            frame = _Frame(own, [_LONG_PATH.sub(r'"...\1"', text.strip())])
            self._frames = [*self._frames[-40:], frame]
        elif self._frames and len(self._frames[-1].lines) < 2 and text.strip(" ~^"):
            self._frames[-1].lines.append(text.strip())

    def text(self) -> str:
        """The exception line, and below it the last frames of the user's own files, and the innermost of all."""
        own = [frame for frame in self._frames if frame.own][-2:]
        chosen = own or self._frames[-2:]
        if self._frames and self._frames[-1] is not chosen[-1]:
            chosen = [*chosen, self._frames[-1]]
        shown = ["  " + " | ".join(part[:120] for part in frame.lines) for frame in chosen]
        return "\n".join([self.exceptions[-1][:260] if self.exceptions else HEADER, *shown])
