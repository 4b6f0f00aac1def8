"""The one error of the checkpoint engine, and how errors of the file system are told."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from transomd.errors import TransomError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointError(TransomError):
    """A checkpoint could not be saved or loaded; the message names step, file or key, and ``hint`` what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        # A training program ends with a traceback, which shows notes (Python 3.11 and later) and no hints.
        if hint and hasattr(self, "add_note"):
            self.add_note(f"hint: {hint}")


class FencedError(CheckpointError):
    """A newer start of the program is at work, so this one must not write."""


def human_bytes(count: float) -> str:
    """``count`` bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"


def storage_error(what: str, error: OSError, folder: Path, needed: int) -> CheckpointError:
    """Say what the file system refused; a full one with the bytes needed and free."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        hint = f"free space on the file system of {folder}, or lower checkpoint.keep"
        return CheckpointError(f"{what}: {reason}: needs {needed} bytes, {_free(folder)}", hint=hint)
    where = error.filename or folder
    hint = f"check the owner and the mode of {folder}" if error.errno in (errno.EACCES, errno.EPERM) else ""
    if error.errno == errno.EFBIG:
        hint = "lift the limit on the size of files: see 'ulimit -f'"
    return CheckpointError(f"{what}: {where}: {reason}", hint=hint)


def _free(folder: Path) -> str:
    for place in (folder, *folder.parents):
        try:
            stat = os.statvfs(place)
        except OSError:
            continue
        return f"{stat.f_bavail * stat.f_frsize} bytes free"
    return "free space unknown"
