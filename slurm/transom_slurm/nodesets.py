"""Host lists as Slurm writes them (``n[1-2,5],gpu[01-10]``), expanded and folded without asking Slurm."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException  # type: ignore[import-untyped]

# ClusterShell's own grammar has groups (@rack), set operators (! & ^), wildcards and steps (1-9/2); none is Slurm's.
_PART = re.compile(r"(?:[A-Za-z0-9._-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+")

MAX_NAMES = 64 * 1024
"""Names in one list: as many as Slurm takes in one range (``MAX_RANGE``). A short text could hold any number."""
_MAX_DIGITS = 18


class HostlistError(ValueError):
    """A text is no host list; the message names the part that is wrong."""


def _parts(text: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _faults(part: str) -> str:
    if not part:
        return "an empty name between commas"
    if part.count("[") != part.count("]"):
        return f"'{part}': a bracket is not closed"
    if not _PART.fullmatch(part):
        return f"'{part}': names hold letters, digits, '.', '_' and '-', brackets hold numbers and ranges (n[1-4,7])"
    return ""


def _count(part: str) -> int:
    """How many names a part stands for, without making them."""
    brackets = re.findall(r"\[([^\]]*)\]", part)
    return math.prod(sum(_width(numbers) for numbers in bracket.split(",")) for bracket in brackets)


def _width(numbers: str) -> int:
    low, dash, high = numbers.partition("-")
    if max(len(low), len(high)) > _MAX_DIGITS:
        return MAX_NAMES + 1
    return max(int(high) - int(low) + 1, 0) if dash else 1


def expand(text: str) -> tuple[str, ...]:
    """The names in a host list, in the order written, each once; empty for an empty list and for ``(null)``.

    Raises HostlistError, which names the part that is wrong; also for more than ``MAX_NAMES``.
    """
    text = text.strip()
    if text in ("", "(null)", "None", "None assigned"):
        return ()
    names: dict[str, None] = {}
    room = MAX_NAMES
    for part in (part.strip() for part in _parts(text)):
        if fault := _faults(part):
            raise HostlistError(f"not a host list: {fault}")
        room -= _count(part)
        if room < 0:
            raise HostlistError(f"not a host list: '{part[:80]}': more than {MAX_NAMES} names")
        names.update(dict.fromkeys(_expand_part(part)))
    return tuple(names)


def _expand_part(part: str) -> Iterable[str]:
    if "[" not in part:
        return (part,)
    try:
        return [str(name) for name in NodeSet(part, autostep=None)]
    except NodeSetException as error:
        raise HostlistError(f"not a host list: '{part}': {error}") from None


def fold(names: Iterable[str]) -> str:
    """The shortest host list of these names, sorted, each once: ``n[1-3,5]``."""
    names = list(names)
    for name in names:
        if fault := _faults(name):
            raise HostlistError(f"not a node name: {fault}")
    return str(NodeSet.fromlist(names, autostep=None)) if names else ""
