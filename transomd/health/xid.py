"""NVIDIA's Xid codes by what they say about a node.

Codes, meanings and immediate actions after NVIDIA's Xid catalogue (copy of 2025-10). Only :attr:`Bucket.FATAL` and
:attr:`Bucket.RESET` make a node unfit; a code that is not in the table is :attr:`Bucket.WATCH`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Bucket(Enum):
    """What a code says about the node that printed it."""

    FATAL = "fatal"
    """The GPU, its memory or its links are broken: no job belongs on the node."""
    RESET = "reset"
    """The GPU has to be reset before further use; a driver fault is as likely as a broken part."""
    PROGRAM = "program"
    """Most often the program's own fault; a restart of the program is what the catalogue asks for."""
    ECHO = "echo"
    """Follows another event (or a normal end) and is no cause by itself."""
    WATCH = "watch"
    """Worth counting; no action now."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One code of the catalogue."""

    code: int
    bucket: Bucket
    meaning: str


_TABLE = (
    Xid(13, Bucket.PROGRAM, "graphics engine exception"),
    Xid(31, Bucket.PROGRAM, "GPU memory page fault"),
    Xid(32, Bucket.PROGRAM, "corrupt push buffer"),
    Xid(43, Bucket.ECHO, "channel reset after a fault of its process"),
    Xid(45, Bucket.ECHO, "pre-emptive channel removal"),
    Xid(46, Bucket.RESET, "GPU stopped processing"),
    Xid(48, Bucket.FATAL, "double bit ECC error"),
    Xid(54, Bucket.FATAL, "auxiliary power is not connected"),
    Xid(61, Bucket.WATCH, "microcontroller breakpoint"),
    Xid(62, Bucket.FATAL, "power management unit halted"),
    Xid(63, Bucket.ECHO, "row remapping or page retirement recorded"),
    Xid(64, Bucket.FATAL, "row remapping or page retirement failed"),
    Xid(68, Bucket.PROGRAM, "video decoder exception"),
    Xid(69, Bucket.PROGRAM, "graphics class error"),
    Xid(74, Bucket.FATAL, "NVLink error"),
    Xid(79, Bucket.FATAL, "GPU has fallen off the bus"),
    Xid(92, Bucket.WATCH, "high single-bit ECC error rate"),
    Xid(94, Bucket.WATCH, "contained memory error"),
    Xid(95, Bucket.FATAL, "uncontained memory error"),
    Xid(109, Bucket.RESET, "context switch time-out"),
    Xid(110, Bucket.RESET, "security fault"),
    Xid(119, Bucket.FATAL, "GSP RPC time-out"),
    Xid(120, Bucket.FATAL, "GSP error"),
    Xid(121, Bucket.WATCH, "corrected C2C link error"),
    Xid(123, Bucket.WATCH, "power management RPC failure"),
    Xid(136, Bucket.FATAL, "NVLink training failed"),
    Xid(137, Bucket.ECHO, "NVLink privilege error"),
    Xid(140, Bucket.FATAL, "unrecovered ECC error"),
    Xid(143, Bucket.FATAL, "GPU initialisation error"),
    Xid(144, Bucket.WATCH, "NVLink SAW error"),
    Xid(145, Bucket.WATCH, "NVLink RLW error"),
    Xid(146, Bucket.WATCH, "NVLink TLW error"),
    Xid(147, Bucket.WATCH, "NVLink TREX error"),
    Xid(148, Bucket.WATCH, "NVLink NVLPW_CTRL error"),
    Xid(149, Bucket.WATCH, "NVLink NETIR error"),
    Xid(150, Bucket.WATCH, "NVLink MSE error"),
    Xid(154, Bucket.ECHO, "recovery action changed"),
    Xid(155, Bucket.RESET, "NVLink software-defined error"),
    Xid(156, Bucket.WATCH, "resource retirement event"),
    Xid(157, Bucket.WATCH, "resource retirement failure"),
    Xid(158, Bucket.FATAL, "GPU fatal time-out"),
    Xid(160, Bucket.WATCH, "channel retirement event"),
    Xid(167, Bucket.FATAL, "PCIe fatal time-out"),
    Xid(168, Bucket.FATAL, "reduced memory capacity"),
    Xid(171, Bucket.FATAL, "uncorrectable DRAM error"),
    Xid(172, Bucket.FATAL, "uncorrectable SRAM error"),
)

CATALOGUE = {xid.code: xid for xid in _TABLE}
"""Every code in the table by its number."""

_FATAL_BY_SEVERITY = frozenset(range(144, 151))


def lookup(code: int, severity: str = "") -> Xid:
    """The entry for a code; codes 144 to 150 are fatal when their line says ``fatal``."""
    entry = CATALOGUE.get(code, Xid(code, Bucket.WATCH, "not in the catalogue"))
    if code in _FATAL_BY_SEVERITY and severity == "fatal":
        return Xid(code, Bucket.FATAL, entry.meaning)
    return entry
