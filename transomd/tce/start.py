"""Which epoch a start of the program is."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from transomd.tce import epochs, restore
from transomd.tce.environment import at_least
from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder

log = logging.getLogger("transom.tce")


def begin(directory: Path, world_size: int, epoch: int | None, held: int = 0) -> tuple[int, str]:
    """The epoch, and the token that tells a claim of this start from another's ('': whoever has the epoch may).

    A given epoch is claimed at once. A number of our own is claimed by the first save only, so that a program which
    merely loads does not fence the one that trains. It is above ``held``, the newest one that memory holds something
    of: that may not be claimed yet.
    """
    if epoch is not None:
        _claim_given(directory, at_least(epoch, 0, "epoch"))
        return epoch, ""
    mine = max(_newest_epoch(directory) or 0, held) + 1, uuid.uuid4().hex
    if world_size == 1:
        return mine
    exchange = restore.group_exchange(world_size)
    if exchange is None:
        raise CheckpointError(
            f"{world_size} ranks need an epoch, and cannot agree on one without a process group",
            hint="call torch.distributed.init_process_group first, or give epoch=N, growing with every start",
        )
    everyones: list[tuple[int, str]] = exchange(mine)
    return max(number for number, _ in everyones), everyones[0][1]


def _newest_epoch(directory: Path) -> int | None:
    try:
        return epochs.newest_epoch(directory)
    except OSError as error:
        raise storage_error("the checkpoint directory cannot be read", error, directory, 0) from error


def _claim_given(directory: Path, epoch: int) -> None:
    try:
        make_folder(directory)
        epochs.claim_epoch(directory, epoch)
    except OSError as error:
        told = storage_error(f"epoch {epoch} could not be claimed", error, directory, 4096)
        if not directory.is_dir():
            raise told from error
        log.warning("%s; going on: an earlier start of this program is not kept from writing", told)
