"""A site's limits for the checks, and what the probe is asked because of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transomd.errors import SpecError
from transomd.words import CheckMode

CHECKS = {
    "gpu-count": "every GPU that the allocation counts on answers",
    "xid": "no fatal Xid, SXid or driver message in the kernel log",
    "xid-reset": "no Xid after which the GPU must be reset",
    "ecc": "uncorrected memory errors since the GPU was last reset",
    "row-remap": "row remapping has not failed",
    "throttle": "no hardware slowdown, thermal or power-brake throttling",
    "processes": "no process of nobody's job computes on the GPUs",
    "disk": "space and inodes of the local file systems",
    "mounts": "the file systems that jobs need answer, and can be written where they must",
    "memory": "installed and available host memory",
    "clock": "the clock's offset against the head node",
}
"""Every check of this version and what it asserts."""

_PARTS = {
    "gpu-count": ("gpus",),
    "xid": ("kernel",),
    "xid-reset": ("kernel",),
    "ecc": ("gpus",),
    "row-remap": ("remaps",),
    "throttle": ("gpus",),
    "processes": ("processes",),
    "disk": ("disk",),
    "mounts": ("mounts",),
    "memory": ("memory",),
}
_ALWAYS = ("host", "load", "memory", "tasks", "kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Limits and modes. Validated at construction: SpecError names every fault at once.

    A limit of None (or an empty list) means that there is none, and the check then gives no result of its own.
    Fractions are 0 to 1, sizes MiB, times seconds.
    """

    modes: Mapping[str, CheckMode] = field(default_factory=dict)
    """Mode per check; a check that is not named is ``observe``."""
    gpus: int | None = None
    """GPUs a node must have when no allocation says so."""
    kernel_window: float = 86400.0
    """Kernel messages older than this say nothing, even when they are since boot."""
    kernel_logs: tuple[str, ...] = ("/var/log/kern.log",)
    """Logs to read before the kernel's ring buffer; empty: the ring buffer only."""
    ecc_uncorrected_max: int = 0
    disk_paths: tuple[str, ...] = ("/", "/tmp")
    disk_free_min: float = 0.02
    inodes_free_min: float = 0.02
    mounts: tuple[str, ...] = ()
    """Paths that must exist and answer."""
    writable: tuple[str, ...] = ("/tmp",)
    """Paths that must also not be mounted read-only."""
    mount_deadline: float = 3.0
    memory_total_min_mb: int | None = None
    memory_available_min_mb: int | None = None
    clock_offset_max: float = 5.0
    gpu_process_allow: tuple[str, ...] = ()
    """Base names of programs of the site's own that may hold a GPU. Processes of root are never foreign."""

    def __post_init__(self) -> None:
        faults = tuple(self._faults())
        if faults:
            raise SpecError("health profile: " + "; ".join(faults), faults, hint="correct the [health] section")

    def _faults(self) -> list[str]:
        faults = [
            f"modes.{name}: no such check; one of {', '.join(CHECKS)}" for name in self.modes if name not in CHECKS
        ]
        for name in ("disk_free_min", "inodes_free_min"):
            if not 0 <= getattr(self, name) < 1:
                faults.append(f"{name}: {getattr(self, name)} is no fraction from 0 to below 1")
        for name in ("kernel_window", "mount_deadline", "clock_offset_max"):
            if not getattr(self, name) > 0:
                faults.append(f"{name}: {getattr(self, name)} is not above 0 seconds")
        for name in ("gpus", "memory_total_min_mb", "memory_available_min_mb", "ecc_uncorrected_max"):
            if (value := getattr(self, name)) is not None and value < 0:
                faults.append(f"{name}: {value} is below 0")
        for name in ("disk_paths", "mounts", "writable", "kernel_logs"):
            faults += [f"{name}: {path!r} is no absolute path" for path in getattr(self, name) if path[:1] != "/"]
        return faults

    def mode(self, check: str) -> CheckMode:
        """The mode of one check."""
        return self.modes.get(check, CheckMode.OBSERVE)

    def on(self, check: str) -> bool:
        """Whether a check is run at all."""
        return self.mode(check) is not CheckMode.OFF

    def answerable(self, parts: Iterable[str]) -> Profile:
        """Return the profile with only those checks on that these parts of the probe can answer."""
        there = set(parts)
        dumb = [check for check in CHECKS if not there.issuperset(_PARTS.get(check, ()))]
        return replace(self, modes={**self.modes, **dict.fromkeys(dumb, CheckMode.OFF)})

    def request(self, deadline: float = 8.0) -> str:
        """The probe's argument: only the parts that these checks need, within ``deadline`` seconds."""
        parts = dict.fromkeys(part for check in CHECKS if self.on(check) for part in _PARTS.get(check, ()))
        asked: dict[str, Any] = {
            "deadline": deadline,
            "parts": list(dict.fromkeys((*parts, *_ALWAYS))),
            "disk": list(self.disk_paths),
            "mounts": list(dict.fromkeys((*self.mounts, *self.writable))),
            "mount_deadline": self.mount_deadline,
            "window": self.kernel_window,
            "kernel_logs": list(self.kernel_logs),
        }
        return json.dumps(asked, sort_keys=True)
