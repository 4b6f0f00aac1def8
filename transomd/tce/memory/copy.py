"""Copying a state into a slot. The part that the training waits for: nothing is allocated, nothing waits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from transomd.tce.memory.arena import Arena
from transomd.tce.memory.move import Run, move
from transomd.tce.memory.table import Place, Table, aligned
from transomd.tce.payload import Payload, is_plain, on_host


def lay_out(payloads: Sequence[tuple[Payload, bool]], rank: int, world_size: int, needs: tuple[str, ...]) -> Table:
    """Where each file goes in a slot; with each payload, whether storage gets it too."""
    at = 0
    places = []
    for payload, stored in payloads:
        rest_at = at + aligned(payload.tensor_bytes)
        size, rest = payload.tensor_bytes, len(payload.rest)
        keys = payload.layout.keys
        places.append(Place(payload.name, payload.ranks, keys, payload.records, at, size, rest_at, rest, stored))
        at = rest_at + aligned(rest)
    return Table(rank, world_size, needs, tuple(places))


def fill(arena: Arena, slot: int, table: Table, payloads: Sequence[tuple[Payload, bool]]) -> None:
    """Copy the files of all payloads to their places. Raises MemoryError."""
    memory, base = arena.image(slot), arena.address + arena.offset(slot)
    runs: list[Run] = []
    for place, (payload, _) in zip(table.places, payloads, strict=True):
        memory[place.rest_at : place.rest_at + place.rest_bytes] = payload.rest
        if not place.records:
            continue
        memory[place.tensors_at : place.tensors_at + len(payload.header)] = payload.header
        for record in place.records:
            tensor, at = payload.layout.values[record.name], place.tensors_at + record.offset
            if is_plain(tensor):
                runs.append((base + at, tensor.data_ptr(), record.bytes))
            elif record.bytes:
                _gather(tensor, memory, at, base)
    move(runs)


def _gather(tensor: torch.Tensor, memory: memoryview, at: int, base: int) -> None:
    """Copy one tensor that lies elsewhere, or scattered."""
    try:
        target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
        target.copy_(tensor)
    except (RuntimeError, ValueError, TypeError):
        # A type that torch cannot copy by its strides.
        host = on_host(tensor)
        ctypes.memmove(base + at, host.data_ptr(), host.nbytes)
