"""Writing one rank's share of a checkpoint, and completing the checkpoint once every rank's share is there.

Order of writes: data files, rank manifest, step manifest. Each is whole and durable before the next begins, so after
a kill or a power cut at any point what a manifest tells of is there. No rank waits for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transomd.tce.catalogue import step_folders
from transomd.tce.epochs import check_epoch
from transomd.tce.errors import CheckpointError, FencedError
from transomd.tce.files import digest, link_file, make_folder, remove_files, sync_folder, write_file
from transomd.tce.image import PartImage, write_part
from transomd.tce.manifest import (
    MANIFEST,
    PartEntry,
    RankEntry,
    RankManifest,
    StepManifest,
    decode_rank_manifest,
    encode,
    parse_step_folder,
    rank_manifest_name,
    step_folder,
)

_FAILED = re.compile(r"rank-(\d+)\.failed")
_SAME = "name the same ranks in 'replicated' on each of them"


@dataclass(frozen=True)
class Writer:
    """Writes the share of one rank of one epoch into ``directory``."""

    directory: Path
    rank: int
    world_size: int
    epoch: int
    _own: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = f"rank-{self.rank:05d}|replica-{self.rank:05d}(-[0-9a-f]{{8}})?"
        object.__setattr__(self, "_own", re.compile(rf"\.?({name})\.(safetensors|pt|json|failed)(\..*)?"))

    @property
    def _failed_name(self) -> str:
        return f"rank-{self.rank:05d}.failed"

    def folder(self, step: int) -> Path:
        """Where ``step`` is written."""
        return self.directory / step_folder(step, self.epoch)

    def write(self, step: int, images: Sequence[PartImage], needs: tuple[str, ...] = ()) -> None:
        """Write this rank's files and then its manifest. Raises OSError, or CheckpointError when fenced.

        ``needs`` are the parts that this rank would load: there is no checkpoint without them, whoever writes them.
        """
        check_epoch(self.directory, self.epoch)
        folder = self.folder(step)
        make_folder(folder)
        remove_files([folder / self._failed_name])
        parts = tuple(write_part(folder, image) for image in images)
        sync_folder(folder)
        manifest = RankManifest(step, self.epoch, self.rank, self.world_size, time.time(), parts, needs)
        content = encode(manifest)
        write_file(folder / rank_manifest_name(self.rank), len(content), [content])
        sync_folder(folder)

    def written(self, step: int) -> bool:
        """Whether this rank has written ``step`` in this epoch already."""
        return (self.folder(step) / rank_manifest_name(self.rank)).exists()

    def complete(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` exists."""
        return (self.folder(step) / MANIFEST).exists()

    def stored(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` exists and outlives a power cut: who made it may still be about to sync.

        Raises OSError.
        """
        if not self.complete(step):
            return False
        sync_folder(self.folder(step))
        return True

    def commit(self, step: int) -> bool:
        """Write the step's manifest if every rank's is there; True if this call did.

        Raises OSError, CheckpointError when a newer epoch is at work or ranks do not agree on who needs what,
        ValueError if a rank manifest is damaged.
        """
        folder = self.folder(step)
        if self.complete(step) or self.missing_rank(step) is not None:
            return False
        ranks = [self._read_rank(folder, rank) for rank in range(self.world_size)]
        _check_needs(step, [rank for rank, _ in ranks])
        content = encode(_step_manifest(step, self.epoch, ranks))
        try:
            check_epoch(self.directory, self.epoch)
        except FencedError:
            if self.complete(step):
                return False  # another rank was faster, and the next start has begun on that
            raise
        # Whoever made the folder may have died before its name was durable; others' manifests may be there but not yet
        # on the disk, where they must be before the one that names them.
        sync_folder(self.directory)
        sync_folder(folder)
        return link_file(folder / MANIFEST, content)

    def missing_rank(self, step: int) -> int | None:
        """A rank that has not written ``step`` yet; None: all have.

        Asks from the next rank on, and stops at the first that is missing: of many ranks only the last asks for all.
        """
        folder = self.folder(step)
        others = ((self.rank + 1 + offset) % self.world_size for offset in range(self.world_size))
        return next((rank for rank in others if not (folder / rank_manifest_name(rank)).exists()), None)

    def fail(self, step: int, message: str) -> None:
        """Take back this rank's files of ``step``, and tell the other ranks that it will never be complete."""
        folder = self.folder(step)
        with contextlib.suppress(OSError):
            self._remove_own(folder)
            content = json.dumps({"rank": self.rank, "step": step, "error": message}).encode() + b"\n"
            write_file(folder / self._failed_name, len(content), [content])

    def take_back(self, step: int) -> None:
        """Remove what this rank has written of ``step``, which is to be tried again."""
        with contextlib.suppress(OSError):
            self._remove_own(self.folder(step))

    def failed_rank(self, step: int) -> CheckpointError | None:
        """The failure another rank told of; its step can never be complete, so this rank's files go."""
        folder = self.folder(step)
        with contextlib.suppress(OSError, ValueError):
            names = (match for name in os.listdir(folder) if (match := _FAILED.fullmatch(name)))
            for match in names:
                told = json.loads((folder / match[0]).read_bytes())
                self._remove_own(folder)
                return CheckpointError(f"step {step}: rank {int(match[1])} could not write: {told['error']}")
        return None

    def remove_unfinished(self) -> None:
        """Remove what this rank left in incomplete checkpoints of its own epoch, when the program begins again."""
        for folder in step_folders(self.directory):
            step, epoch = parse_step_folder(folder.name) or (0, 0)
            if epoch == self.epoch and not self.complete(step):
                self._remove_own(folder)

    def _remove_own(self, folder: Path) -> None:
        own = sorted((name for name in os.listdir(folder) if self._own.fullmatch(name)), key=_manifest_first)
        remove_files(folder / name for name in own)

    def _read_rank(self, folder: Path, rank: int) -> tuple[RankManifest, bytes]:
        content = (folder / rank_manifest_name(rank)).read_bytes()
        manifest = decode_rank_manifest(content, f"{folder.name}/{rank_manifest_name(rank)}")
        told = (manifest.step, manifest.epoch, manifest.rank, manifest.world_size)
        if told != ((parse_step_folder(folder.name) or (0, 0))[0], self.epoch, rank, self.world_size):
            raise ValueError(f"{folder.name}/{rank_manifest_name(rank)}: is of another step, epoch, rank or world size")
        return manifest, content


def _manifest_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".json"), name


def _check_needs(step: int, ranks: Sequence[RankManifest]) -> None:
    there = {part.name for rank in ranks for part in rank.parts}
    for rank in ranks:
        missing = [name for name in rank.needs if name not in there]
        if missing:
            raise CheckpointError(
                f"step {step}: rank {rank.rank} needs {', '.join(missing)}, which no rank has written",
                hint=_SAME,
            )
    _check_none_thrust_upon(step, ranks)


def _check_none_thrust_upon(step: int, ranks: Sequence[RankManifest]) -> None:
    """A rank that is given a part by another one alone must not have what is under the same keys somewhere else."""
    needs = {rank.rank: set(rank.needs) for rank in ranks}
    keys = {part.name: part.keys for rank in ranks for part in rank.parts}
    for rank in ranks:
        for part in rank.parts:
            for other in part.ranks:
                mine = needs.get(other, set())
                if part.name not in mine and (twice := set(part.keys).intersection(_all_keys(mine, keys))):
                    raise CheckpointError(
                        f"step {step}: rank {rank.rank} has written {', '.join(sorted(twice))} for rank {other}, too, "
                        "which holds them otherwise",
                        hint=_SAME,
                    )


def _all_keys(names: Iterable[str], keys: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {key for name in names for key in keys[name]}


def _step_manifest(step: int, epoch: int, ranks: Sequence[tuple[RankManifest, bytes]]) -> StepManifest:
    entries = tuple(
        RankEntry(rank.rank, rank_manifest_name(rank.rank), len(content), digest(content)) for rank, content in ranks
    )
    parts = tuple(
        PartEntry(part.name, rank.rank, part.ranks, part.keys, {file.name: file.bytes for file in part.files})
        for rank, _ in ranks
        for part in rank.parts
    )
    return StepManifest(step, epoch, len(ranks), time.time(), entries, parts)
