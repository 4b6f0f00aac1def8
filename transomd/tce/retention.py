"""Which checkpoints go. Decided from the list alone; carried out manifest first, so that what is left is never half."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from transomd.tce.catalogue import Checkpoint
from transomd.tce.files import sync_folder
from transomd.tce.manifest import MANIFEST

log = logging.getLogger("transom.tce")
IMPORTING = ".import.", ".tmp"
"""How the name of a folder begins and ends that an import fills beside the checkpoints."""
ABANDONED_S = 86_400.0
"""An import in whose folder nothing has changed for so long was killed."""


def surplus(checkpoints: Sequence[Checkpoint], keep: int, protected: Collection[Path], epoch: int) -> list[Path]:
    """Complete checkpoints that are not among the ``keep`` newest complete ones, oldest first.

    Damaged ones do not count, so the last good one always stays; protected ones and newer epochs' stay too.
    """
    complete = sorted((c for c in checkpoints if c.complete), key=lambda c: c.order)
    return [c.path for c in complete[: max(0, len(complete) - keep)] if c.path not in protected and c.epoch <= epoch]


def leftovers(checkpoints: Sequence[Checkpoint], protected: Collection[Path], epoch: int) -> list[Path]:
    """Folders that can never become complete: without a manifest, and older than a complete one.

    A rank writes its steps in order, so once a step is complete no rank of that epoch still writes an older one.
    Folders with a damaged manifest stay: a person may want to see them. So do those that cannot be read.
    """
    newest = max((c.order for c in checkpoints if c.complete and c.epoch <= epoch), default=(-1, -1))
    return [
        c.path
        for c in checkpoints
        if not c.complete and c.order < newest and c.path not in protected and without_manifest(c.path)
    ]


def without_manifest(folder: Path) -> bool:
    """Whether there is no manifest in a folder; False if that cannot be found out."""
    try:
        return MANIFEST not in os.listdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def abandoned_imports(directory: Path, now: float) -> list[Path]:
    """Folders of imports that were killed, in order. Raises OSError if ``directory`` cannot be read."""
    head, tail = IMPORTING
    folders = [directory / name for name in sorted(os.listdir(directory)) if name.startswith(head)]
    return [path for path in folders if path.name.endswith(tail) and now - _changed_at(path, now) > ABANDONED_S]


def _changed_at(folder: Path, now: float) -> float:
    """When something in it was last changed; ``now`` where that cannot be found out."""
    try:
        return max(os.lstat(path).st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return now


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its manifest durably first. What cannot be removed is logged and left."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / MANIFEST)
            sync_folder(folder)
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("old checkpoint %s could not be removed: %s", folder, error)
