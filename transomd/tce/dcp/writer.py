"""``TransomStorageWriter``: what torch.distributed.checkpoint saves through."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from transomd.tce.dcp import commit, staging
from transomd.tce.dcp.commit import Share
from transomd.tce.dcp.facts import Stored
from transomd.tce.dcp.values import check_loadable
from transomd.tce.environment import at_least, from_environment
from transomd.tce.errors import CheckpointError, storage_error
from transomd.tce.files import make_folder
from transomd.tce.manifest import step_folder

_SHARE = "transom: the share of a rank"


class TransomStorageWriter(StorageWriter):
    """Saves into ``directory``; the ``checkpoint_id`` of ``dcp.save`` and ``dcp.async_save`` is the step.

    ``epoch`` counts the starts of the program, so that a process of an earlier start cannot complete a checkpoint any
    more; without one, the first save takes the next free number. ``keep``: so many complete checkpoints stay, None:
    all. A checkpoint exists once every rank's file is durable; a save that fails on any rank raises on all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, epoch: int | None = None, keep: int | None = None) -> None:
        super().__init__()
        self.directory = Path(os.path.abspath(directory))
        self.epoch = None if epoch is None else at_least(epoch, 0, "epoch")
        self.keep = None if keep is None else at_least(keep, 1, "keep")
        self._token = commit.TOKEN
        # By thread, in which one save runs from its first call to its last: another may begin meanwhile.
        self._steps: dict[int, int] = {}

    @classmethod
    def from_env(cls, **overrides: Any) -> TransomStorageWriter:
        """The writer that the launcher describes: TRANSOM_CHECKPOINT_DIR, TRANSOM_EPOCH, TRANSOM_CHECKPOINT_KEEP."""
        found = from_environment(os.environ, {"rank": 0, "world_size": 1, **overrides})
        arguments = {key: value for key, value in found.items() if key in ("directory", "epoch", "keep")}
        return cls(**{**arguments, **overrides})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin the save of the step ``checkpoint_id``."""
        if checkpoint_id is None:
            self._steps.pop(threading.get_ident(), None)
        else:
            self._steps[threading.get_ident()] = step_of(checkpoint_id)

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
            epoch = commit.claim(self.directory, self.epoch, self._token)
        except OSError as error:
            raise storage_error(f"step {step}: the epoch could not be claimed", error, self.directory, 4096) from error
        commit.begin(self.directory / step_folder(step, epoch), step, epoch)
        return [
            replace(plan, storage_data=Share(step, epoch, rank, len(plans), time.time()))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and, but for rank 0, its manifest, durably."""
        # With cached plans the share is that of an earlier save, of the same epoch and rank.
        share = replace(plan.storage_data, step=self._step())
        folder = self.directory / step_folder(share.step, share.epoch)
        items = _Items(plan, planner)
        try:
            make_folder(folder)
            results, share = self._write(folder, items, share)
        except OSError as error:
            what = f"step {share.step}: rank {share.rank} could not write its checkpoint"
            raise storage_error(what, error, self.directory, items.bytes) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(_SHARE), 0, share)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint: facts, the manifest of rank 0 and, last, that of the step. On the coordinator."""
        shares = [result[-1].storage_data for result in results]
        stored = {one.index: one.storage_data for result in results for one in result[:-1]}
        try:
            commit.complete(self.directory, shares, metadata, stored)
        except OSError as error:
            what = f"step {shares[0].step} could not be completed"
            raise storage_error(what, error, self.directory, 1 << 20) from error
        commit.tidy(self.directory, shares[0].epoch, self.keep)

    def storage_meta(self) -> StorageMeta:
        """What planners are told of this save."""
        return StorageMeta(checkpoint_id=str(self._step()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a step."""
        return str(checkpoint_id).isdecimal()

    def _step(self) -> int:
        step = self._steps.get(threading.get_ident())
        if step is None:
            raise CheckpointError(
                f"{self.directory}: the step is not known",
                hint="give it as checkpoint_id: dcp.save(state, storage_writer=writer, checkpoint_id=str(step))",
            )
        return step

    def _write(self, folder: Path, items: _Items, share: Share) -> tuple[list[WriteResult], Share]:
        record = staging.put(folder, share.name, items.like, items.bring, items.values) if items.like else None
        share = commit.share_of(share, record)
        if share.rank != 0:
            share = commit.write_share(folder, share)
        found = {tensor.name: tensor for tensor in record.tensors} if record else {}
        results = []
        for name, item in items.items.items():
            tensor = found[name]
            where = Stored(
                f"{share.name}.safetensors", name, tensor.dtype, tensor.offset, tensor.bytes, tensor.xxh3_128
            )
            results.append(WriteResult(item.index, tensor.bytes, where))
        return results, share


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a ``checkpoint_id`` names; CheckpointError if it is no whole number."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else str(checkpoint_id)
    if not text.isdecimal():
        raise CheckpointError(
            f"checkpoint_id is {text!r}, and must be the step, a whole number",
            hint="the directory goes to the writer or reader: TransomStorageWriter(directory), checkpoint_id=str(step)",
        )
    return int(text)


@dataclass(init=False)
class _Items:
    """What one rank writes: the items of a plan by a name for people, and what each looks like."""

    items: Mapping[str, WriteItem]
    like: Mapping[str, torch.Tensor]
    values: dict[str, torch.Tensor]

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._planner = planner
        self.values = {}
        items: dict[str, WriteItem] = {}
        for item in plan.items:
            items[_name(item, items)] = item
        self.items = items
        self.like = {name: self._look(name, item) for name, item in items.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.like.values())

    def bring(self, name: str) -> torch.Tensor:
        """The tensor, or the bytes of a value as a tensor, to be written now."""
        if name in self.values:
            return self.values[name]
        return self._resolve(name, self.items[name])

    def _look(self, name: str, item: WriteItem) -> torch.Tensor:
        if item.type == WriteItemType.BYTE_IO:
            self.values[name] = self._value(item)
            return torch.empty_like(self.values[name], device="meta")
        tensor = self._resolve(name, item)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def _resolve(self, name: str, item: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name} cannot be saved: it is no dense tensor", hint="save its dense parts")
        return tensor

    def _value(self, item: WriteItem) -> torch.Tensor:
        content = self._planner.resolve_data(item)
        assert isinstance(content, io.BytesIO)
        value = bytearray(content.getvalue())
        check_loadable(item.index.fqn, value)
        return torch.frombuffer(value, dtype=torch.uint8)


def _name(item: WriteItem, taken: Mapping[str, WriteItem]) -> str:
    """``model.weight``, of a shard ``model.weight@128,0`` with where it begins."""
    name = item.index.fqn
    if item.type == WriteItemType.SHARD and item.index.offset is not None:
        name = f"{name}@{','.join(map(str, item.index.offset))}"
    while name in taken or name == "__metadata__":
        name += "#"
    return name
