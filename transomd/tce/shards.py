"""DTensors: which share of a tensor this rank holds, and which ranks hold the same. All of it is known without asking.

A share is saved as the tensor that it is. Where it belongs stands beside it, so that it is never taken for another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Shard(NamedTuple):
    """A rank's share of a DTensor: sizes, names and ranks of the mesh, placements, the shape of the whole tensor, and
    where in it the share begins.
    """

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tensors that are dealt out alike have in common, on whichever ranks."""
        return self.mesh, self.names, self.placements

    def fits(self, other: Shard) -> bool:
        """Whether both are the same share of such a tensor, whatever mesh and ranks are called."""
        mine = self.mesh, self.placements, self.shape, self.offsets
        return mine == (other.mesh, other.placements, other.shape, other.offsets)

    def __str__(self) -> str:
        sizes = [str(size) for size in self.mesh]
        if self.names:
            sizes = [f"{name}={size}" for name, size in zip(self.names, self.mesh, strict=True)]
        where = f"from {list(self.offsets)} of {list(self.shape)}" if self.offsets else f"of {list(self.shape)}"
        return f"{', '.join(self.placements)} on a mesh of {', '.join(sizes)}, {where}"


@dataclass(frozen=True, eq=False)
class Deal:
    """How a mesh deals out tensors of some placements: the ranks that hold the same as this one, in their order, and
    all ranks of the mesh. ``same`` is empty where this rank is not of the mesh.
    """

    same: tuple[int, ...]
    ranks: frozenset[int]


class Dealt(NamedTuple):
    """What is told of one DTensor on this rank; ``sizes``: of its local tensor."""

    shard: Shard
    deal: Deal
    sizes: tuple[int, ...]


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor; nothing is imported for it."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a DTensor, any other tensor itself; what a collective still brings is waited for."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


def dealt(tensor: Any, shape: tuple[int, ...] | None = None) -> Dealt:
    """Where this rank's share of a DTensor belongs, or of one of another ``shape`` that is dealt out as it is.

    ValueError says why it cannot be saved by itself.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    whole = tensor.shape if shape is None else torch.Size(shape)
    return _dealt(mesh, tensor.placements, None if coordinate is None else tuple(coordinate), whole)


@lru_cache(maxsize=4096)
def _dealt(mesh: Any, placements: Sequence[Any], at: tuple[int, ...] | None, shape: torch.Size) -> Dealt:
    # Here and not above: who has a DTensor has imported it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    told = tuple(map(_placement, placements))
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    names = tuple(mesh.mesh_dim_names or ())
    ranks = tuple(mesh.mesh.flatten().tolist())
    shard = Shard(tuple(mesh.shape), names, ranks, told, tuple(shape), tuple(map(int, offsets)))
    return Dealt(shard, _deal(mesh, placements, at), tuple(map(int, sizes)))


@lru_cache(maxsize=1024)
def _deal(mesh: Any, placements: Sequence[Any], at: tuple[int, ...] | None) -> Deal:
    """One object for one deal, as parts are sorted by it."""
    same: list[int] = []
    if at is not None:
        index = (slice(None) if each.is_replicate() else place for each, place in zip(placements, at, strict=True))
        same = mesh.mesh[tuple(index)].flatten().tolist()
    return Deal(tuple(sorted(same)), frozenset(mesh.mesh.flatten().tolist()))


def _placement(placement: Any) -> str:
    """A placement as it is written; ValueError if what a rank holds under it is no part of the tensor."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return "Replicate()"
    if kind == "Shard":
        return f"Shard({placement.dim})"
    if kind == "_StridedShard":
        return f"_StridedShard({placement.dim}, {placement.split_factor})"
    if placement.is_partial():
        raise ValueError(f"each rank holds an addend of it ({kind})")
    raise ValueError(f"its placement {kind} is not known")
