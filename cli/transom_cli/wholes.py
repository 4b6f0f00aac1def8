"""The shapes of the whole tensors of which a checkpoint holds shares. Without torch, which reads them, none is told."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import Part

DCP = "torch.distributed.checkpoint"
"""The key of a part that this wrote; :data:`transomd.tce.dcp.facts.KEYS` holds it, and is not had without torch."""
Whole = tuple[int, ...]
_UNREADABLE = (ValueError, TypeError, LookupError, RuntimeError, pickle.UnpicklingError)
"""What comes of files that are damaged, or of a later version."""
WORD = b"shards"
"""Stands in the file of a part that has shares; a part without it is not read with torch, whose import takes long."""


def whole_shapes(folder: Path, parts: Iterable[Part], *, by_dcp: bool) -> Mapping[tuple[str, str], Whole]:
    """Return, by part and tensor, the shape of the whole of which the tensor is a share. Never raises for damage."""
    with contextlib.suppress(ImportError, OSError, CheckpointError, *_UNREADABLE):
        return _of_dcp(folder, parts) if by_dcp else _of_engine(folder, parts)
    return {}


def _of_engine(folder: Path, parts: Iterable[Part]) -> dict[tuple[str, str], Whole]:
    found: dict[tuple[str, str], Whole] = {}
    for part in parts:
        rest = next((file.name for file in part.files if file.name.endswith(".pt")), "")
        if not rest or WORD not in (folder / rest).read_bytes():
            continue
        from transomd.tce.payload import read_layout

        found |= {(part.name, name): shard.shape for name, shard in read_layout(folder, part).shards.items()}
    return found


def _of_dcp(folder: Path, parts: Iterable[Part]) -> dict[tuple[str, str], Whole]:
    from transomd.tce.dcp.facts import read_facts

    part_of = {file.name: part.name for part in parts for file in part.files}
    return {
        (part_of[chunk.stored.file], chunk.stored.name): tensor.shape
        for tensor in read_facts(folder).tensors.values()
        for chunk in tensor.chunks
        if chunk.sizes != tensor.shape and chunk.stored.file in part_of
    }
