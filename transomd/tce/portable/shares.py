"""Whole tensors out of the shares that ranks wrote of their DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transomd.tce.errors import CheckpointError
from transomd.tce.layout import Layout, Path, path_text
from transomd.tce.portable.nest import assemble
from transomd.tce.shards import Shard

Piece = tuple[Shard, torch.Tensor]
Part = tuple[Layout, Callable[[str], torch.Tensor]]
"""A part, and how its tensors are read."""


def whole_tensors(layout: Layout, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """By name, the whole of each DTensor of which ``layout`` has a share, out of the ``parts`` of all ranks.

    CheckpointError names one whose shares do not make it up.
    """
    return {
        name: _whole(path, layout.shards[name], _pieces(path, layout.shards[name], parts))
        for path, name in layout.tensors.items()
        if name in layout.shards
    }


def _pieces(path: Path, shard: Shard, parts: Sequence[Part]) -> list[Piece]:
    """The shares of one tensor, each once. What stands at its path on ranks of another mesh is another tensor."""
    found: dict[tuple[int, ...], Piece] = {}
    for layout, read in parts:
        name = layout.tensors.get(path, "")
        other = layout.shards.get(name)
        if other is not None and (other.ranks, other.shape) == (shard.ranks, shard.shape):
            piece = read(name)
            if piece.numel() or not found:
                found.setdefault(other.offsets, (other, piece))
    return [piece for piece in found.values() if piece[1].numel()] or list(found.values())[:1]


def _whole(path: Path, shard: Shard, pieces: Sequence[Piece]) -> torch.Tensor:
    if any("Strided" in placement for placement in shard.placements):
        _check_apart(path, shard, pieces)
    chunks = [(piece.offsets, tensor) for piece, tensor in pieces]
    return assemble(path_text(path), shard.shape, pieces[0][1].dtype, chunks)


def _check_apart(path: Path, shard: Shard, pieces: Sequence[Piece]) -> None:
    """A share may be scattered over the tensor; then some overlap when each is taken for one block."""
    taken = torch.zeros(shard.shape, dtype=torch.bool)
    for piece, tensor in pieces:
        block = taken
        for dim, (offset, length) in enumerate(zip(piece.offsets, tensor.shape, strict=True)):
            block = block.narrow(dim, offset, min(length, block.shape[dim] - offset))
        if block.any():
            raise CheckpointError(
                f"{path_text(path)}: its shares lie scattered in it ({shard}), and are not put together here",
                hint="load it on the same mesh, or save it through transomd.tce.dcp",
            )
        block.fill_(True)
