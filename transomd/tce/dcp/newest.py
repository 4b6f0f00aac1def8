"""Loading the newest checkpoint that is good on every rank: a damaged one is named and the next older one tried."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from transomd.tce.dcp.facts import DAMAGED, DamagedError, folders
from transomd.tce.dcp.reader import TransomStorageReader
from transomd.tce.dcp.shares import look, whole
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import parse_step_folder, step_folder
from transomd.tce.replicate.holdings import decode

log = logging.getLogger("transom.tce")


def load_newest(
    state_dict: dict[str, Any],
    directory: str | os.PathLike[str] | None = None,
    *,
    resume_step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    planner: Callable[[], LoadPlanner] | None = None,
) -> int | None:
    """Do ``dcp.load`` from the newest checkpoint of at most ``resume_step`` that is good on every rank.

    Returns its step; None: there is nothing to resume from. Every rank of the group must call it. Without a directory,
    TRANSOM_CHECKPOINT_DIR and TRANSOM_RESUME_STEP say what to load. Raises CheckpointError if there are checkpoints and
    none is good: nothing was loaded then.
    """
    if directory is None:
        found = TransomStorageReader.from_env()
        directory, resume_step = found.directory, found.resume_step if resume_step is None else resume_step
    place = Path(os.path.abspath(directory))
    refuted: dict[str, str] = {}
    while (agreed := _agreed(place, resume_step, refuted, process_group)) is not None:
        name, ranks = agreed
        step, _ = parse_step_folder(name) or (0, 0)
        reader = _Reader(place / name, ranks)
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

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder.parent)
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
    stored = [folder.name for folder in folders(place)]
    mine = stored, [one.encode() for one in look(place)]
    everyones = [mine]
    if dist.is_available() and dist.is_initialized():
        everyones = [mine] * dist.get_world_size(group)
        dist.all_gather_object(everyones, mine, group=group)
    held = whole(decode(one) for _, of_rank in everyones for one in of_rank)
    in_memory = {step_folder(step, epoch): ranks for (epoch, step), ranks in held.items()}
    found = {name: 0 for name in stored if all(name in names for names, _ in everyones)} | in_memory
    steps = {name: parse_step_folder(name) or (0, 0) for name in found if name not in refuted}
    wanted = [name for name, (step, _) in steps.items() if bound is None or step <= bound]
    newest = max(wanted, key=lambda name: steps[name][::-1], default=None)
    return None if newest is None else (newest, found[newest])


def _damage(error: CheckpointException) -> str:
    """What is damaged; raises ``error`` if a rank failed for another reason, which no older checkpoint would heal."""
    causes = [failure[0] for failure in error.failures.values()]
    # DCP wraps what comes from reading metadata into an error of its own, of which only the words are left.
    if not all(isinstance(cause, DamagedError) or DAMAGED in str(cause) for cause in causes):
        raise error
    return "; ".join(dict.fromkeys(str(cause) for cause in causes))
