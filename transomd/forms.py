"""The small written forms in ``job.yaml`` and ``transomd.toml``: durations, sizes and Slurm's time limits."""

from __future__ import annotations

import math
import re

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", re.ASCII)
_TIME_LIMIT = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNLIMITED = ("UNLIMITED", "INFINITE")


def parse_size(text: str) -> int | None:
    """Return the bytes of ``8G``, ``512 MiB`` or ``1000``; None for anything else."""
    match = _SIZE.fullmatch(text.strip())
    return int(float(match[1]) * _SIZES[match[2].upper()]) if match else None


def seconds(value: object) -> float:
    """Return a duration in seconds from a number (seconds) or text such as ``90``, ``90s``, ``10m``, ``1h30m``, ``2d``.

    Raises ValueError with a sentence for people.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        number = _from_text(str(value).strip().lower(), value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"must be a duration such as 90, 10m or 1h30m, got {value!r}")
    return number


def _from_text(text: str, given: object) -> float:
    found = _DURATION.fullmatch(text) if text else None
    if found is None:
        raise ValueError(f"must be a duration such as 90, 10m or 1h30m, got {given!r}")
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS.values(), strict=True) if part)


def time_limit_seconds(text: str) -> int | None:
    """Return a Slurm time limit in seconds; None for UNLIMITED.

    The forms are those of sbatch(1): ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
    ``days-hours:minutes`` and ``days-hours:minutes:seconds``. Raises ValueError.
    """
    if text.upper() in _UNLIMITED:
        return None
    found = _TIME_LIMIT.fullmatch(text)
    if found is None:
        raise ValueError(f"must be a Slurm time limit such as 90, 12:00:00, 2-00:00:00 or UNLIMITED, got {text!r}")
    days, *rest = (int(part) if part else 0 for part in found.groups())
    a, b, c = rest
    if found.group(1) is not None:
        total = ((days * 24 + a) * 60 + b) * 60 + c
    elif found.group(4) is not None:
        total = (a * 60 + b) * 60 + c
    else:
        total = a * 60 + b
    if total == 0:
        raise ValueError(f"must be longer than nothing, got {text!r}")
    return total
