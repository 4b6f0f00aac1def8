"""Reading what a stranger sent: every value of the right type and of an ordinary size, or ValueError with its name.

Standard library only: the launcher reads its directives with the same module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

LATEST = 1e11
"""Unix seconds that no clock will show."""
MAX_TEXT = 500
MAX_NAMES = 50_000
MAX_NUMBER = 1 << 53
"""Steps and exit codes stay below this, so that every JSON reader and database keeps them exactly."""
MAX_COUNT = 1 << 31
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raises ValueError, also for NaN, infinities and what is nested too deep."""
    try:
        value = json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return mapping(value, "the body")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def mapping(value: object, key: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{key}: expected an object, got {type(value).__name__}")
    return value


def items(data: Mapping[str, Any], key: str, limit: int) -> list[Any]:
    """Return a list of at most ``limit`` values; one that is missing or null is empty."""
    value = data.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"{key}: expected a list of at most {limit}")
    return value


def integer(data: Mapping[str, Any], key: str, limit: int = MAX_NUMBER) -> int:
    """Return a whole number from 0 to below ``limit``."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ValueError(f"{key}: expected a whole number from 0 to below {limit}")
    return value


def seconds(data: Mapping[str, Any], key: str) -> float:
    """Return a time in seconds, since 1970 or of whatever it is."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LATEST:
        raise ValueError(f"{key}: expected seconds")
    return float(value)


def maybe_integer(data: Mapping[str, Any], key: str, limit: int = MAX_NUMBER) -> int | None:
    """Return a whole number, or None for null."""
    return None if data.get(key) is None else integer(data, key, limit)


def maybe_seconds(data: Mapping[str, Any], key: str) -> float | None:
    """Return a time, or None for null."""
    return None if data.get(key) is None else seconds(data, key)


def line(data: Mapping[str, Any], key: str, limit: int = MAX_TEXT) -> str:
    """Return one line of text, cut to ``limit``; what is not printable becomes a blank. Missing is empty."""
    value = data.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key}: expected text, got {type(value).__name__}")
    return printable(value, limit)


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return text on one line in which nothing steers a terminal, at most ``limit`` characters long."""
    return "".join(char if char.isprintable() else " " for char in text[:limit])


def name(value: object, key: str) -> str:
    """Return the name of a node."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{key}: expected the name of a node")
    return value


def names(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of nodes."""
    return [name(value, key) for value in items(data, key, MAX_NAMES)]


def reasons(data: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return a sentence for each of some nodes."""
    value = mapping(data.get(key) or {}, key)
    if len(value) > MAX_NAMES:
        raise ValueError(f"{key}: expected at most {MAX_NAMES}")
    return {name(node, key): line(value, node) for node in value}


def word(data: Mapping[str, Any], key: str, words: frozenset[str]) -> str:
    """Return one of some words."""
    value = data.get(key)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{key}: expected one of {', '.join(sorted(words))}")
    return value
