"""Loading the newest checkpoint that is good on every rank: a damaged one is named and the next older one tried."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from transomd.tce.dcp.facts import DAMAGED, DamagedError, folders
from transomd.tce.dcp.reader import TransomStorageReader
from transomd.tce.dcp.shares import look, partly, search, whole
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import parse_step_folder, step_folder
from transomd.tce.replicate.holdings import decode

log = logging.getLogger("transom.tce")


def load_newest(
    state_dict: dict[str, Any],
    directory: str | os.PathLike[str] | None = None,
    *,
    resume_step: int | None = None,
    epoch: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    planner: Callable[[], LoadPlanner] | None = None,
) -> int | None:
    """Do ``dcp.load`` from the newest checkpoint of at most ``resume_step`` that is good on every rank.

    Returns its step; None: there is nothing to resume from. Every rank of the group must call it. Without a directory,
    TRANSOM_CHECKPOINT_DIR, TRANSOM_RESUME_STEP and TRANSOM_EPOCH say what to load. ``epoch`` is that of this start,
    under which what is in memory alone is brought to storage, before anything is saved. Raises CheckpointError if there
    are checkpoints and none is good: nothing was loaded then.
    """
    if directory is None:
        found = TransomStorageReader.from_env()
        directory, resume_step = found.directory, found.resume_step if resume_step is None else resume_step
        epoch = found.epoch if epoch is None else epoch
    place = Path(os.path.abspath(directory))
    refuted: dict[str, str] = {}
    while (agreed := _agreed(place, resume_step, refuted, process_group)) is not None:
        name, ranks = agreed
        step, _ = parse_step_folder(name) or (0, 0)
        reader = _Reader(place / name, ranks, epoch)
        try:
            load(
                state_dict,
                storage_reader=reader,
                planner=planner() if planner else None,
                process_group=process_group,
            )
        except CheckpointException as error:
            refuted[name] = _damage(error)
            log.warning("%s: %s; trying the next older checkpoint", place, refuted[name])
            continue
        finally:
            reader.reset()
        return step
    if refuted:
        raise CheckpointError(
            f"{place} holds checkpoints and none can be loaded: {'; '.join(refuted.values())}",
            hint="see 'transom ckpt verify'; to start from the beginning, move them to another directory",
        )
    return None


class _Reader(TransomStorageReader):
    """Reads one folder, which the memory of ``ranks`` ranks holds, too (0: it does not)."""

    def __init__(self, folder: Path, ranks: int, epoch: int | None) -> None:
        super().__init__(folder.parent, epoch=epoch)
        self._found = folder, ranks

    def find(self) -> tuple[Path, int]:
        """That folder."""
        return self._found


def _agreed(
    place: Path, bound: int | None, refuted: dict[str, str], group: dist.ProcessGroup | None
) -> tuple[str, int] | None:
    """The newest that every rank sees in storage, or that the memories of all nodes hold together.

    With it, of how many ranks it is in memory (0: it is not).
    """
    # Memory first: a keeper that has nobody ends once all of it is in storage, and there it is seen then.
    mine = [one.encode() for one in look(place)]
    everyones = _exchange(([folder.name for folder in folders(place)], mine), group)
    stored = set.intersection(*({*names} for names, _ in everyones))
    held = [decode(one) for _, of_rank in everyones for one in of_rank]
    found = dict.fromkeys(stored, 0) | _names(whole(held))

    def wanted(name: str) -> bool:
        return name not in refuted and (bound is None or _order(name)[1] <= bound)

    newest = max(filter(wanted, found), key=_order, default="")
    parts = [part for part in partly(held) if wanted(name := _name(part[0])) and _order(name) > _order(newest)]
    if parts:
        # The rest may be on nodes where no rank of this start is. One asks for all.
        asks = not _distributed() or dist.get_rank(group) == 0
        told = _exchange([one.encode() for one in search(place, parts)] if asks else [], group)[0]
        found |= _names(whole([*held, *map(decode, told)]))
        newest = max(filter(wanted, found), key=_order, default="")
    return (newest, found[newest]) if newest else None


def _name(at: tuple[int, int]) -> str:
    epoch, step = at
    return step_folder(step, epoch)


def _names(found: Mapping[tuple[int, int], int]) -> dict[str, int]:
    return {_name(at): ranks for at, ranks in found.items()}


def _order(name: str) -> tuple[int, int]:
    step, epoch = parse_step_folder(name) or (-1, -1)
    return epoch, step


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _exchange(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank says."""
    if not _distributed():
        return [mine]
    everyones = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _damage(error: CheckpointException) -> str:
    """What is damaged; raises ``error`` if a rank failed for another reason, which no older checkpoint would heal."""
    causes = [failure[0] for failure in error.failures.values()]
    # DCP wraps what comes from reading metadata into an error of its own, of which only the words are left.
    if not all(isinstance(cause, DamagedError) or DAMAGED in str(cause) for cause in causes):
        raise error
    return "; ".join(dict.fromkeys(str(cause) for cause in causes))
