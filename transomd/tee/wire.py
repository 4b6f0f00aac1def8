"""Reads evidence and verdicts from a wire or the database: bounded, checked, never trusted by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from transomd.tee.types import LATEST, MAX_TEXT, Evidence, Verdict
from transomd.words import Action, Blame, Confidence, FailureClass, Role, Word

MAX_NAMES = 64
"""Most names that one list of a message may hold; the rest is dropped."""

MAX_NAME = 255
"""Longest name of a node, file or signature that is kept."""

MAX_EVIDENCE = 200
"""Most pieces of evidence that one verdict may carry."""

_W = TypeVar("_W", bound=Word)


def read_evidence(data: Mapping[str, Any], *, trusted: bool = False) -> Evidence:
    """Read what :meth:`Evidence.to_json` wrote, maybe by a newer or hostile sender.

    Unknown keys are dropped, text is cut, lists are bounded. Unless ``trusted`` (our own database), the result is
    always ``forgeable``: a sender cannot vouch for itself. Raises ValueError on a missing key, a wrong type or an
    unknown word.
    """
    _require_mapping(data)
    return Evidence(
        source=_text(data, "source", MAX_NAME),
        signature=_text(data, "signature", MAX_NAME),
        text=_text(data, "text", MAX_TEXT, ""),
        role=_word(data, "role", Role),
        failure_class=_word(data, "failure_class", FailureClass, FailureClass.UNKNOWN),
        blame=_word(data, "blame", Blame, Blame.UNKNOWN),
        action=_word(data, "action", Action, Action.RESTART),
        at=_number(data, "at"),
        node=_text(data, "node", MAX_NAME, ""),
        rank=_integer(data, "rank"),
        peer_nodes=_texts(data, "peer_nodes"),
        peer_ranks=_integers(data, "peer_ranks"),
        file=_text(data, "file", MAX_NAME * 4, ""),
        line=_integer(data, "line"),
        count=max(1, _integer(data, "count") or 1),
        forgeable=not trusted or _flag(data, "forgeable", True),
    )


def read_verdict(data: Mapping[str, Any], *, trusted: bool = False) -> Verdict:
    """Read what :meth:`Verdict.to_json` wrote. Without ``trusted`` no node is drainable. Raises ValueError as above."""
    _require_mapping(data)
    evidence = _list(data, "evidence")[:MAX_EVIDENCE]
    return Verdict(
        failure_class=_word(data, "failure_class", FailureClass),
        blame=_word(data, "blame", Blame),
        action=_word(data, "action", Action),
        confidence=_word(data, "confidence", Confidence),
        summary=_text(data, "summary", MAX_TEXT * 4),
        nodes=_texts(data, "nodes"),
        ranks=_integers(data, "ranks"),
        drainable=_texts(data, "drainable") if trusted else (),
        evidence=tuple(read_evidence(item, trusted=trusted) for item in evidence),
    )


def _require_mapping(data: object) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object, got {type(data).__name__}")


def plain(text: str, limit: int = MAX_TEXT) -> str:
    """Return text that can be stored and shown: no lone surrogates, no control characters, at most ``limit`` long."""
    sound = text[: limit * 2].encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char == "\n" else " " for char in sound)[:limit]


def _text(data: Mapping[str, Any], key: str, limit: int, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key}: expected text, got {type(value).__name__}")
    if not value and default is None:
        raise ValueError(f"{key}: is empty")
    return plain(value, limit)


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key, ())
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key}: expected a list, got {type(value).__name__}")
    return list(value)


def _texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    items = _list(data, key)[:MAX_NAMES]
    return tuple(_text({key: item}, key, MAX_NAME) for item in items if item != "")


def _integers(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    numbers = (_integer({key: item}, key) for item in _list(data, key)[: MAX_NAMES * 16])
    return tuple(number for number in numbers if number is not None)


def _integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise ValueError(f"{key}: expected a number of ordinary size")
    return value


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        raise ValueError(f"{key}: expected Unix seconds")
    return float(value)


def _flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false")
    return value


def _word(data: Mapping[str, Any], key: str, words: type[_W], default: _W | None = None) -> _W:
    value = data.get(key, default)
    try:
        return words(value)
    except ValueError:
        known = ", ".join(str(word) for word in words)
        raise ValueError(f"{key}: {str(value)[:60]!r} is none of: {known}") from None
