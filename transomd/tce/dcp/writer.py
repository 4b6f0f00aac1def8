"""``TransomStorageWriter``: what torch.distributed.checkpoint saves through."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from transomd.tce.dcp import commit, staging, tiers
from transomd.tce.dcp.commit import Share
from transomd.tce.dcp.facts import Stored, encode
from transomd.tce.dcp.items import Items
from transomd.tce.dcp.stager import NotPlain
from transomd.tce.dcp.tiers import Staging, Terms
from transomd.tce.environment import at_least, from_environment
from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder
from transomd.tce.handle import SaveHandle
from transomd.tce.manifest import MANIFEST, TensorRecord, step_folder
from transomd.tce.memory.budget import switched_off
from transomd.tce.memory.ledger import NoRoom
from transomd.tce.memory.pool import Policy, policy_of
from transomd.tce.schedule import Every, every_of

log = logging.getLogger("transom.tce")
_SHARE = "transom: the share of a rank"
_ALL = 1 << 62
_ARGUMENTS = ("directory", "epoch", "keep", "storage_every", "replica_every")


class TransomStorageWriter(StorageWriter):
    """Saves into ``directory``; the ``checkpoint_id`` of ``dcp.save`` and ``dcp.async_save`` is the step.

    ``epoch`` counts the starts of the program, so that a process of an earlier start cannot complete a checkpoint any
    more; without one, the first save takes the next free number. ``keep``: so many complete checkpoints stay, None:
    all. A save that fails on any rank raises on all.

    ``memory``, ``when_full``, ``storage_every`` and ``replica_every`` are those of CheckpointEngine: with the memory
    tier a save is done when every rank's share is in memory that outlives the program; a keeper brings it to other
    nodes and to storage.
    ``handle``, of the save that was done last, tells of these stages. Without the tier a save is done when it is
    durable. In another process than the one that made the writer there is no memory tier.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        epoch: int | None = None,
        keep: int | None = None,
        memory: bool | None = None,
        when_full: Policy = "latest",
        storage_every: int | Literal["auto"] = 1,
        replica_every: int = 1,
    ) -> None:
        super().__init__()
        self.directory = Path(os.path.abspath(directory))
        self.epoch = None if epoch is None else at_least(epoch, 0, "epoch")
        self.keep = None if keep is None else at_least(keep, 1, "keep")
        self.handle: SaveHandle | None = None
        token = commit.TOKEN if self.epoch is None else ""
        every = Every(every_of(storage_every), at_least(replica_every, 1, "replica_every"))
        self._terms = Terms(self.directory, self.keep or _ALL, every, policy_of(when_full), token)
        self._memory = memory is True or (memory is None and not switched_off(os.environ))
        self._pid = os.getpid()
        self._synchronize_after_execute = False
        # By thread, in which one save runs from its first call to its last: another may begin meanwhile.
        self._steps: dict[int, int] = {}
        self._staged: dict[int, Staging] = {}

    @classmethod
    def from_env(cls, **overrides: Any) -> TransomStorageWriter:
        """The writer that the launcher describes.

        Reads TRANSOM_CHECKPOINT_DIR, TRANSOM_EPOCH, TRANSOM_CHECKPOINT_KEEP, TRANSOM_CHECKPOINT_STORAGE_EVERY and
        TRANSOM_CHECKPOINT_REPLICA_EVERY.
        """
        found = from_environment(os.environ, {"rank": 0, "world_size": 1, **overrides})
        return cls(**{**{key: value for key, value in found.items() if key in _ARGUMENTS}, **overrides})

    def __getstate__(self) -> dict[str, Any]:
        """For ``async_save`` in a process of its own."""
        return {**self.__dict__, "handle": None, "_steps": {}, "_staged": {}}

    def close(self, timeout: float = 600.0) -> None:
        """Wait until what was saved is in storage, at most ``timeout`` seconds, and let go of the memory."""
        tiers.close(self.directory, timeout, leave=True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin the save of the step ``checkpoint_id``."""
        thread = threading.get_ident()
        if (unfinished := self._staged.pop(thread, None)) is not None:
            unfinished.drop()
        if checkpoint_id is None:
            self._steps.pop(thread, None)
        else:
            self._steps[thread] = step_of(checkpoint_id)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` is to call ``synchronize_staging``: no, the copy is made when ``stage`` returns."""
        return False

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state for ``async_save``: into the arena, or, before the first save or without it, beside it."""
        tier = tiers.known(self.directory) if self._in_memory else None
        if tier is not None:
            try:
                return tier.stager.stage(state_dict, tier.room)
            except (OSError, MemoryError, NoRoom, NotPlain) as error:
                log.warning("the state is copied, but not into the memory that outlives the program: %s", error)
        with contextlib.closing(DefaultStager(StagingOptions(False, False, False, False))) as stager:
            copied = stager.stage(state_dict)
            assert isinstance(copied, dict)
            return copied

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what would leave several checkpoints of one step."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False is not supported: without them nobody knows when a checkpoint is complete",
                hint="leave use_collectives out",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the step is known."""
        self._step()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the epoch, and tell each rank who it is. On the coordinator."""
        step = self._step()
        try:
            # With memory the keepers see to the claim from the second save on: a store that hangs holds up none.
            epoch = commit.claim(self.directory, self.epoch, self._terms.token, once=self._in_memory)
        except OSError as error:
            raise storage_error(f"step {step}: the epoch could not be claimed", error, self.directory, 4096) from error
        if not self._carried(step, epoch):
            commit.begin(self.directory / step_folder(step, epoch), step, epoch, self._in_memory)
        return [
            replace(plan, storage_data=Share(step, epoch, rank, len(plans), time.time(), self._terms.token))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's share into memory; or, without the memory tier, write it, durably."""
        # With cached plans the share is that of an earlier save, of the same epoch and rank.
        share = replace(plan.storage_data, step=self._step())
        if self._carried(share.step, share.epoch):
            self.handle = self._again(share)
            return _done([WriteResult(MetadataIndex(_SHARE), 0, share)])
        items = Items(plan, planner)
        results = self._stage(share, items) if self._in_memory else None
        return _done(results or self._write(share, items))

    def _carried(self, step: int, epoch: int) -> bool:
        """Whether the step was loaded, and is on its way to storage in this epoch: no other one goes there."""
        return self.directory / step_folder(step, epoch) in commit.CARRIED

    def _again(self, share: Share) -> SaveHandle:
        step = share.step
        log.warning("step %d was loaded from memory and is brought to storage as it was; it is not saved again", step)
        handle = SaveHandle(step, (self.directory / step_folder(step, share.epoch) / MANIFEST).exists)
        handle.in_memory = True
        return handle

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, or let keepers do so: with the facts comes the last share. On the coordinator."""
        shares = [result[-1].storage_data for result in results]
        if self._carried(shares[0].step, shares[0].epoch):
            return
        stored = {one.index: one.storage_data for result in results for one in result[:-1]}
        facts = encode(commit.facts_of(metadata, stored))
        staged = self._staged.pop(threading.get_ident(), None)
        if staged is not None:
            self.handle = self._published(staged, facts)
            return
        try:
            complete = commit.complete(self.directory, shares, facts)
        except OSError as error:
            what = f"step {shares[0].step} could not be completed"
            raise storage_error(what, error, self.directory, 1 << 20) from error
        if complete:
            commit.tidy(self.directory, shares[0].epoch, self.keep)

    def storage_meta(self) -> StorageMeta:
        """What planners are told of this save."""
        return StorageMeta(checkpoint_id=str(self._step()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a step."""
        return str(checkpoint_id).isdecimal()

    @property
    def _in_memory(self) -> bool:
        return self._memory and os.getpid() == self._pid

    def _step(self) -> int:
        step = self._steps.get(threading.get_ident())
        if step is None:
            raise CheckpointError(
                f"{self.directory}: the step is not known",
                hint="give it as checkpoint_id: dcp.save(state, storage_writer=writer, checkpoint_id=str(step))",
            )
        return step

    def _stage(self, share: Share, items: Items) -> list[WriteResult] | None:
        """Copy the share into memory; None, after a warning, if it cannot be had now."""
        try:
            staged = Staging(tiers.tier_of(share, self._terms), share, items.tensors(), items.values)
            if share.rank == 0:
                self._staged[threading.get_ident()] = staged
            else:
                self.handle = staged.publish()
        except (OSError, MemoryError, NoRoom) as error:
            log.warning("step %d is written to storage at once: %s", share.step, error)
            return None
        return _results(share, items, staged.records, known=False)

    def _published(self, staged: Staging, facts: bytes) -> SaveHandle:
        try:
            handle = staged.publish(facts)
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"step {staged.share.step} could not be kept in memory: {error}") from error
        commit.STAGED.add(self.directory / step_folder(handle.step, staged.share.epoch))
        return handle

    def _write(self, share: Share, items: Items) -> list[WriteResult]:
        """Write the share and, but for rank 0, its manifest, durably."""
        folder = self.directory / step_folder(share.step, share.epoch)
        try:
            make_folder(folder)
            record = staging.put(folder, share.name, items.like, items.bring, items.values) if items.like else None
            share = commit.share_of(share, record)
            if share.rank != 0:
                share = commit.write_share(folder, share)
        except OSError as error:
            what = f"step {share.step}: rank {share.rank} could not write its checkpoint"
            raise storage_error(what, error, self.directory, items.bytes) from error
        self.handle = SaveHandle(share.step, (folder / MANIFEST).exists)
        return _results(share, items, record.tensors if record else (), known=True)


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a ``checkpoint_id`` names; CheckpointError if it is no whole number."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else str(checkpoint_id)
    if not text.isdecimal():
        raise CheckpointError(
            f"checkpoint_id is {text!r}, and must be the step, a whole number",
            hint="the directory goes to the writer or reader: TransomStorageWriter(directory), checkpoint_id=str(step)",
        )
    return int(text)


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


def _results(share: Share, items: Items, records: Sequence[TensorRecord], known: bool) -> list[WriteResult]:
    """Where each item lies in the rank's file, and last the share; ``known``: whether digests are taken already."""
    found = {record.name: record for record in records}
    file = f"{share.name}.safetensors"
    results = []
    for name, item in items.items.items():
        record = found[name]
        told = record.xxh3_128 if known else ""
        where = Stored(file, name, record.dtype, record.offset, record.bytes, told)
        results.append(WriteResult(item.index, record.bytes, where))
    return [*results, WriteResult(MetadataIndex(_SHARE), 0, share)]
