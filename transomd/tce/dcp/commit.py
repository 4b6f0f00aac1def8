"""From the shares of all ranks to a checkpoint: epoch, facts, manifests, and what goes once it is there."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from transomd.tce import retention
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.dcp.facts import FILE, KEYS, Chunk, Facts, Stored, TensorFacts
from transomd.tce.epochs import check_epoch, claim_epoch, newest_epoch
from transomd.tce.errors import CheckpointError
from transomd.tce.files import digest, link_file, make_folder, sync_folder, write_file
from transomd.tce.manifest import (
    MANIFEST,
    FileRecord,
    Part,
    PartEntry,
    RankEntry,
    RankManifest,
    StepManifest,
    rank_manifest_name,
    step_folder,
)
from transomd.tce.manifest import encode as encode_manifest
from transomd.tce.persist import Writer

log = logging.getLogger("transom.tce")
TOKEN = uuid.uuid4().hex
"""Tells this start of the program from others, in every process that a writer is sent to."""
RESUMED: dict[Path, None] = {}
"""Folders that this process has loaded from, the last one last: no retention removes them."""
BEGUN: set[Path] = set()
"""Folders of saves that this process has begun and not completed: one may overtake another."""
STAGED: set[Path] = set()
"""Folders of saves that this process has done with the memory tier."""
CARRIED: set[Path] = set()
"""Folders to which what this process has loaded is being brought: storage is to get them, whatever else it gets."""
# All of these are of any directory, as a process may load from one and save into another.
_claimed: dict[tuple[Path, str], int] = {}


@dataclass(frozen=True)
class Share:
    """One rank's part in a save: who it is, what its epoch was claimed with, and what it has written so far."""

    step: int
    epoch: int
    rank: int
    world_size: int
    created: float
    token: str = ""
    parts: tuple[Part, ...] = ()
    entry: RankEntry | None = None

    @property
    def name(self) -> str:
        """The name of the rank's part and, with its ending, of its file."""
        return f"rank-{self.rank:05d}"


def claim(directory: Path, epoch: int | None, token: str, once: bool = False) -> int:
    """Claim ``epoch``, or the number that this start of the program has or can have; returns it.

    ``once``: what this process has claimed already is not looked at again. Raises OSError, or CheckpointError when a
    newer start is at work.
    """
    key = directory, token if epoch is None else str(epoch)
    mine = _claimed.get(key) if epoch is None else epoch
    if once and key in _claimed:
        return _claimed[key]
    make_folder(directory)
    if mine is None:
        mine = _own(directory, token)
    claim_epoch(directory, mine, token)
    _claimed[key] = mine
    return mine


def _own(directory: Path, token: str) -> int:
    """The epoch that another process of this start has claimed (``async_save`` may use one), else the next free one."""
    newest = newest_epoch(directory) or 0
    try:
        claimed = json.loads((directory / f"epoch-{newest:06d}.claim").read_bytes())
    except (OSError, ValueError):
        return newest + 1
    return newest if isinstance(claimed, dict) and claimed.get("token") == token else newest + 1


def resumed(folder: Path) -> None:
    """Note that this process has loaded from a folder."""
    RESUMED.pop(folder, None)
    RESUMED[folder] = None


def loaded(directory: Path) -> list[tuple[Path, bool]]:
    """Folders of ``directory`` that were loaded from, and whether storage lacks them; what matters most comes last."""
    found = [(folder, folder in CARRIED) for folder in RESUMED if folder.parent == directory]
    return sorted(found, key=lambda one: one[1])


def begin(folder: Path, step: int, epoch: int, in_memory: bool) -> None:
    """Note that a save has begun; CheckpointError if the checkpoint is there already."""
    # In memory the store is not asked: what this process has saved is known, and keepers write over nothing.
    if folder in STAGED if in_memory else (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder.parent}: step {step} was saved in epoch {epoch} already, and no checkpoint is ever written over",
            hint="give each save a step of its own",
        )
    BEGUN.add(folder)


def share_of(share: Share, record: FileRecord | None) -> Share:
    """The share with its file noted."""
    return replace(share, parts=(Part(share.name, (), (), (record,) if record else ()),))


def write_share(folder: Path, share: Share) -> Share:
    """Write a rank's manifest durably; returns the share with what the step's manifest says of it."""
    name = rank_manifest_name(share.rank)
    manifest = RankManifest(share.step, share.epoch, share.rank, share.world_size, share.created, share.parts)
    content = encode_manifest(manifest)
    sync_folder(folder)
    write_file(folder / name, len(content), [content])
    sync_folder(folder)
    return replace(share, entry=RankEntry(share.rank, name, len(content), digest(content)))


def complete(directory: Path, shares: Sequence[Share], facts: bytes) -> bool:
    """Write facts, rank 0's manifest and, if no share is still in memory, the step's. Whether it is complete now.

    Raises OSError, CheckpointError when a newer start is at work.
    """
    step, epoch = shares[0].step, shares[0].epoch
    if {(share.step, share.epoch) for share in shares} != {(step, epoch)}:
        raise CheckpointError(f"the ranks have saved different steps: {sorted({share.step for share in shares})}")
    folder = directory / step_folder(step, epoch)
    write_file(folder / FILE, len(facts), [facts])
    part = Part(FILE, (), KEYS, (FileRecord(FILE, len(facts), digest(facts)),))
    first = write_share(folder, replace(shares[0], parts=(*shares[0].parts, part)))
    if any(share.entry is None for share in shares[1:]):
        # Their keepers write them, and whoever comes last completes the step.
        return Writer(directory, 0, len(shares), epoch).commit(step)
    manifest = encode_manifest(_step_manifest([first, *shares[1:]]))
    check_epoch(directory, epoch)
    # Whoever made the folder may have died before its name was durable.
    sync_folder(directory)
    if not link_file(folder / MANIFEST, manifest):
        raise CheckpointError(f"{folder}: was completed by another process, which must not happen")
    BEGUN.discard(folder)
    log.info("step %d of epoch %d is complete: %d ranks", step, epoch, len(shares))
    return True


def facts_of(metadata: Metadata, stored: Mapping[MetadataIndex, Stored]) -> Facts:
    """What DCP's metadata says, with where the bytes are. CheckpointError if JSON cannot hold the planner's data."""
    tensors: dict[str, TensorFacts] = {}
    values: dict[str, Stored] = {}
    for fqn, about in metadata.state_dict_metadata.items():
        if isinstance(about, BytesStorageMetadata):
            values[fqn] = stored[MetadataIndex(fqn)]
        else:
            tensors[fqn] = _tensor_facts(fqn, about, stored)
    return Facts(tensors, values, _paths(metadata.planner_data))


def tidy(directory: Path, epoch: int, keep: int | None) -> None:
    """Remove complete checkpoints beyond ``keep`` and what can never be complete; never raises."""
    # Looked at first: what is completed while the directory is read must not count as never to be complete.
    begun = set(BEGUN)
    try:
        checkpoints = list_checkpoints(directory)
        going = retention.surplus(checkpoints, keep, RESUMED, epoch) if keep is not None else []
        for folder in [*going, *retention.leftovers(checkpoints, {*RESUMED, *begun}, epoch)]:
            check_epoch(directory, epoch)
            retention.remove_checkpoint(folder)
    except (OSError, CheckpointError) as error:
        log.warning("old checkpoints were not removed: %s", error)


def _tensor_facts(fqn: str, about: TensorStorageMetadata, stored: Mapping[MetadataIndex, Stored]) -> TensorFacts:
    chunks = tuple(
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes), stored[MetadataIndex(fqn, chunk.offsets)])
        for chunk in about.chunks
    )
    dtype = str(about.properties.dtype).removeprefix("torch.")
    return TensorFacts(dtype, tuple(about.size), bool(about.properties.requires_grad), chunks)


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    if planner_data is None:
        return None
    if isinstance(planner_data, dict) and all(_is_path(fqn, path) for fqn, path in planner_data.items()):
        return dict(planner_data)
    raise CheckpointError(
        "the planner's own data cannot be stored: only the paths of a flattened state can, as DefaultSavePlanner has",
        hint="use a planner that leaves planner_data as DefaultSavePlanner does",
    )


def _is_path(fqn: object, path: object) -> bool:
    return isinstance(fqn, str) and isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)


def _step_manifest(shares: Sequence[Share]) -> StepManifest:
    entries = tuple(share.entry for share in shares if share.entry is not None)
    assert len(entries) == len(shares)
    parts = tuple(
        PartEntry(part.name, share.rank, part.ranks, part.keys, {file.name: file.bytes for file in part.files})
        for share in shares
        for part in share.parts
    )
    return StepManifest(shares[0].step, shares[0].epoch, len(shares), time.time(), entries, parts)
