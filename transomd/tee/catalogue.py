"""The signatures as values: loads ``signatures.toml`` and finds the first signature that a cleaned line matches."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module, resources
from typing import Any

from transomd.errors import TransomError
from transomd.words import Action, Blame, FailureClass, Role

_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]{4,40})(?: GPU-I:\d+)?\): (?P<code>\d{1,4})\b")
_XID_ANCHOR = "NVRM: Xid"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One kind of line: how it is found, and what it means. Words and fields are explained in ``signatures.toml``."""

    id: str
    source: str
    failure_class: FailureClass
    blame: Blame
    role: Role
    action: Action
    regex: str
    anchors: tuple[str, ...]
    note: str = ""
    bucket: str = ""
    examples: tuple[str, ...] = ()
    counter_examples: tuple[str, ...] = ()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The expression, compiled when it is first needed."""
        return re.compile(self.regex)

    def match(self, line: str) -> re.Match[str] | None:
        """Return where ``line`` matches, or None."""
        if not any(anchor in line for anchor in self.anchors):
            return None
        return self.pattern.search(line)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All signatures in the order in which they are tried. ``xids`` holds those of NVIDIA's error codes, by code."""

    signatures: tuple[Signature, ...]
    xids: Mapping[int, Signature]
    fatal_only: Mapping[int, re.Pattern[str]]

    def find(self, line: str) -> tuple[Signature, re.Match[str]] | None:
        """Return the first signature that matches the cleaned ``line``, and where; None if none does."""
        if _XID_ANCHOR in line and (match := _XID.search(line)):
            return self._xid(line, match), match
        for signature in self.signatures:
            if found := signature.match(line):
                return signature, found
        return None

    def _xid(self, line: str, match: re.Match[str]) -> Signature:
        code = int(match["code"])
        signature = self.xids.get(code) or _unknown_xid(code)
        only = self.fatal_only.get(code)
        if only and not only.search(line):
            return replace(signature, role=Role.CONTEXT, blame=Blame.UNKNOWN, action=Action.NONE)
        return signature

    @property
    def anchors(self) -> frozenset[str]:
        """Every text of which a line must hold one, or it matches nothing."""
        return frozenset(anchor for one in self.signatures for anchor in one.anchors) | {_XID_ANCHOR}


@lru_cache(maxsize=1)
def load() -> Catalogue:
    """Return the catalogue of this package; read once. About 15 ms."""
    return parse(resources.files("transomd.tee").joinpath("signatures.toml").read_text(encoding="utf-8"))


def ready(read: Callable[[], Catalogue] = load) -> Catalogue:
    """Load the catalogue and compile all of it, so that a fault in it is not met with the first failure of a job.

    Raises TransomError. About 15 ms more.
    """
    try:
        catalogue = read()
        for signature in catalogue.signatures:
            _compiled(signature)
    except (OSError, ValueError) as error:
        raise TransomError(
            f"reading the failure signatures transomd/tee/signatures.toml: {error}", hint="install transom again"
        ) from error
    return catalogue


def _compiled(signature: Signature) -> None:
    try:
        signature.pattern  # noqa: B018 - compiled by being asked for
    except re.error as error:
        raise ValueError(f"signature {signature.id}: {error}") from error


def parse(text: str) -> Catalogue:
    """Read a catalogue. Raises ValueError naming the signature that is wrong."""
    data = _toml.loads(text)
    try:
        xids = dict(_xid_entries(data.get("xid", [])))
    except KeyError as error:
        raise ValueError(f"an entry of xid has no {error}") from error
    limited = [entry for entry in data.get("xid", []) if "only" in entry]
    only = {code: re.compile(entry["only"]) for entry in limited for code in _codes(entry)}
    return Catalogue(signatures=tuple(map(_signature, data.get("signature", []))), xids=xids, fatal_only=only)


def _signature(entry: Mapping[str, Any]) -> Signature:
    try:
        return Signature(
            id=entry["id"],
            source=entry["source"],
            regex=entry["regex"],
            anchors=tuple(entry["anchors"]),
            examples=tuple(entry["examples"]),
            counter_examples=tuple(entry.get("not", ())),
            note=entry.get("note", ""),
            failure_class=FailureClass(entry["class"]),
            blame=Blame(entry["blame"]),
            role=Role(entry["role"]),
            action=Action(entry["action"]),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"signature {entry.get('id', '?')}: {error}") from error


def _codes(entry: Mapping[str, Any]) -> list[int]:
    return list(entry["codes"]) if "codes" in entry else [entry["code"]]


def _xid_entries(entries: list[Mapping[str, Any]]) -> Iterator[tuple[int, Signature]]:
    for entry in entries:
        for code in _codes(entry):
            yield code, _xid_signature(code, entry)


def _xid_signature(code: int, entry: Mapping[str, Any]) -> Signature:
    example = entry.get("example")
    return Signature(
        id=f"XID-{code}",
        source="kernel",
        regex=_XID.pattern,
        anchors=(_XID_ANCHOR,),
        failure_class=FailureClass(entry.get("class", "gpu-hardware")),
        blame=Blame(entry.get("blame", "unknown")),
        role=Role(entry.get("role", "root")),
        action=Action(entry.get("action", "restart")),
        note=f"{entry['name']}. {entry.get('note', '')}".strip(),
        bucket=entry["bucket"],
        examples=(example,) if example and f": {code}, " in example else (),
    )


def _unknown_xid(code: int) -> Signature:
    return _xid_signature(code, {"name": "not in the catalogue", "bucket": "", "role": "context"})
