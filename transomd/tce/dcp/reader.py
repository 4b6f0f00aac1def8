"""``TransomStorageReader``: what torch.distributed.checkpoint loads through."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from transomd.tce.dcp import carried, commit, staging
from transomd.tce.dcp.facts import Chunk, Facts, Stored, TensorFacts, folders
from transomd.tce.dcp.shares import Shares, Step, look, whole
from transomd.tce.dcp.source import Source
from transomd.tce.dcp.values import check_loadable
from transomd.tce.dcp.writer import step_of
from transomd.tce.environment import at_least, from_environment
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import MANIFEST, parse_step_folder, step_folder
from transomd.tce.memory.place import agent_socket

log = logging.getLogger("transom.tce")


class TransomStorageReader(StorageReader):
    """Loads from ``directory`` the checkpoint of ``step`` (or of ``checkpoint_id``); None: the newest complete one.

    ``resume_step`` bounds the step that may be chosen. Before anything reaches the program, every rank verifies the
    bytes that it would load: damage is named and raised on all ranks. Each share of a rank is taken from this node's
    memory, else from another node's, else from storage. A step that is in memory alone is found by ``load_newest``;
    and here where this node holds all of it and no agent tells of other nodes, that may not see it. With the ``epoch``
    of this start such a step is brought to storage, before anything is saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        resume_step: int | None = None,
        epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.directory = Path(os.path.abspath(directory))
        self.step = None if step is None else at_least(step, 0, "step")
        self.resume_step = None if resume_step is None else at_least(resume_step, 0, "resume_step")
        self.epoch = None if epoch is None else at_least(epoch, 0, "epoch")
        self.loaded_from = ""
        self._source: Source | None = None
        self._ranks = 0
        self._chunks: dict[MetadataIndex, Chunk] = {}

    @classmethod
    def from_env(cls, **overrides: Any) -> TransomStorageReader:
        """The reader that the launcher describes: TRANSOM_CHECKPOINT_DIR, TRANSOM_RESUME_STEP and TRANSOM_EPOCH."""
        found = from_environment(os.environ, {"rank": 0, "world_size": 1, **overrides})
        arguments = {key: value for key, value in found.items() if key in ("directory", "resume_step", "epoch")}
        return cls(**{**arguments, **overrides})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, of the step ``checkpoint_id`` if it is given."""
        self._release()
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    # Without **kwargs DCP does not ask a second time, for metadata of single ranks, where there is none.
    def read_metadata(self) -> Metadata:
        """What the checkpoint holds. CheckpointError if there is none, DamagedError if its facts are damaged."""
        self._release()
        folder, self._ranks = self.find()
        self._source = _source(folder, self._ranks)
        try:
            facts = self._source.facts()
        except CheckpointError:
            self._source.release()
            raise
        chunks = _chunks(facts)
        about: dict[str, Any] = {fqn: _described(tensor) for fqn, tensor in facts.tensors.items()}
        about.update({fqn: BytesStorageMetadata() for fqn in facts.values})
        meta = StorageMeta(checkpoint_id=str(folder))
        return Metadata(about, planner_data=facts.paths, storage_data=chunks, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take over where the bytes are."""
        self._chunks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify every byte that this rank would load; DamagedError names the first tensor that is damaged."""
        source = self._at()
        try:
            for stored in {self._chunks[i.storage_index].stored: None for i in _in_order(plan.items, self._chunks)}:
                source.check(stored)
        except CheckpointError:
            source.release()
            raise
        return replace(plan, storage_data=(source.folder.name, self._here(source.folder)))

    def _here(self, folder: Path) -> frozenset[int]:
        """The ranks whose shares are in this node's memory, if they are to be brought to storage."""
        step, epoch = parse_step_folder(folder.name) or (0, 0)
        if self.epoch is None or self.epoch <= epoch or not self._ranks:
            return frozenset()
        return frozenset(one.rank for one in look(folder.parent) if (one.epoch, one.step) == (epoch, step))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks load one checkpoint, and deal out what storage lacks of it. On the coordinator."""
        names = sorted({str(plan.storage_data[0]) for plan in plans})
        if len(names) > 1:
            raise CheckpointError(
                f"{self.directory}: the ranks see different checkpoints as the newest: {', '.join(names)}",
                hint="name the step: TransomStorageReader(directory, step=N), or use load_newest",
            )
        here = [plan.storage_data[1] for plan in plans]
        if self.epoch is None or not any(here) or os.path.exists(self.directory / names[0] / MANIFEST):
            return plans
        dealt = carried.tasks(self.epoch, here, self._ranks)
        return [replace(plan, storage_data=task) for plan, task in zip(plans, dealt, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring the bytes into the program, each verified once more as it is read."""
        source = self._at()
        last: tuple[Stored, torch.Tensor] | None = None
        for item in _in_order(plan.items, self._chunks):
            chunk = self._chunks[item.storage_index]
            if last is None or last[0] != chunk.stored:
                last = None
                last = chunk.stored, source.get(chunk.stored, chunk.sizes)
            _bring(item, last[1], planner)
        log.info("%s: loaded from %s", source.folder.name, source.told)
        self.loaded_from = source.told
        del last
        self._resumed(source, plan.storage_data)
        source.release()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _resumed(self, source: Source, task: object) -> None:
        """What was loaded is not removed; if storage lacks it, it is brought there."""
        folder = source.folder
        if isinstance(task, carried.Task) and source.shares is not None:
            folder = carried.bring(folder, self._ranks, source.shares, task)
        commit.resumed(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a step."""
        return str(checkpoint_id).isdecimal()

    def find(self) -> tuple[Path, int]:
        """The folder that would be loaded, and of how many ranks memory has it (0: none); CheckpointError if none."""
        try:
            found = self._seen()
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error
        if not found:
            which = "" if self.step is None else f" of step {self.step}"
            raise CheckpointError(
                f"{self.directory} holds no complete checkpoint{which} that torch.distributed.checkpoint wrote",
                hint=f"transom ckpt list {self.directory}",
            )
        epoch, step = max(found)
        return self.directory / step_folder(step, epoch), found[epoch, step]

    def _seen(self) -> dict[Step, int]:
        """The steps in question. Raises OSError."""
        in_memory = whole(look(self.directory))
        stored = (parse_step_folder(folder.name) or (0, 0) for folder in folders(self.directory))
        found = {(epoch, step): in_memory.get((epoch, step), 0) for step, epoch in stored}
        if agent_socket() is None:
            found = {**found, **in_memory}
        return {at: ranks for at, ranks in found.items() if self._wanted(at[1])}

    def _wanted(self, step: int) -> bool:
        return step == self.step if self.step is not None else self.resume_step is None or step <= self.resume_step

    def _at(self) -> Source:
        assert self._source is not None
        return self._source

    def _release(self) -> None:
        if self._source is not None:
            self._source.release()
        self._source = None


def _source(folder: Path, ranks: int) -> Source:
    """The checkpoint, from the memory of so many ranks where there are any."""
    step, epoch = parse_step_folder(folder.name) or (0, 0)
    try:
        return Source(folder, Shares(folder.parent, epoch, step, ranks) if ranks else None)
    except OSError as error:
        log.warning("memory is not asked for %s: %s", folder.name, error)
        return Source(folder)


def _chunks(facts: Facts) -> dict[MetadataIndex, Chunk]:
    found = {MetadataIndex(fqn): Chunk((), (stored.bytes,), stored) for fqn, stored in facts.values.items()}
    for fqn, tensor in facts.tensors.items():
        found.update({MetadataIndex(fqn, chunk.offsets): chunk for chunk in tensor.chunks})
    return found


def _described(tensor: TensorFacts) -> TensorStorageMetadata:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    properties = TensorProperties(dtype=dtype, requires_grad=tensor.requires_grad)
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)


def _in_order(items: Sequence[ReadItem], chunks: dict[MetadataIndex, Chunk]) -> list[ReadItem]:
    """As the bytes lie in the files."""
    return sorted(items, key=lambda item: _place(chunks[item.storage_index].stored))


def _place(stored: Stored) -> tuple[str, int, str]:
    return stored.file, stored.offset, stored.name


def _bring(item: ReadItem, tensor: torch.Tensor, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        content = bytes(staging.bytes_of(tensor))
        check_loadable(item.dest_index.fqn, content)
        planner.load_bytes(item, io.BytesIO(content))
        return
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise CheckpointError(f"{item.dest_index.fqn}: {list(tensor.shape)} do not fit into {list(target.shape)}")
    target.copy_(tensor)
    planner.commit_tensor(item, target)
