"""Staging for ``dcp.async_save``: the state is copied into a slot of the arena once, where its share then stays.

At that time neither the step is known nor what DCP will give this rank to write. So all local tensors are copied, first
those that the rank wrote in its last save, as the file has them; if it is to write the same again, header and values go
beside them, and the slot is in force without another copy. If not, the share is copied once more, in the background.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transomd.tce.layout import Layout
from transomd.tce.manifest import TensorRecord
from transomd.tce.memory.copy import fill
from transomd.tce.memory.pool import Opened
from transomd.tce.memory.table import ALIGN, Place, Table, aligned
from transomd.tce.memory.tier import MemoryTier
from transomd.tce.payload import Payload

UNKNOWN_STEP = -1
_HEADER_BYTES_EACH = 512
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
Path = tuple[Any, ...]
Leaves = dict[Path, torch.Tensor]


class NotPlain(Exception):
    """The state holds a tensor of a kind that is not known here."""


@dataclass(frozen=True)
class Staged:
    """A state in a slot: where its tensors begin (``start``) and which is where, by address and size."""

    opened: Opened
    start: int
    base: int
    paths: Mapping[tuple[int, int], Path]

    def path(self, tensor: torch.Tensor) -> Path | None:
        """Which tensor of the state this is; None if it is none of them."""
        return self.paths.get((tensor.data_ptr(), tensor.nbytes)) if tensor.is_contiguous() else None

    def offset(self, tensor: torch.Tensor) -> int:
        """Where it begins, counted from the first."""
        return tensor.data_ptr() - self.base - self.start


class Stager:
    """Stages states into the arena of ``tier``. Remembers what the last save wrote, in its order."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self._written: list[Path] = []
        self._staged: list[Staged] = []

    def stage(self, state: dict[str, Any], room: int) -> dict[str, Any]:
        """The state, all of whose tensors lie in a slot with ``room`` for header, values and facts.

        The slot is given back when the last of them is gone, unless it was put in force. Raises OSError, MemoryError,
        NoRoom, or NotPlain.
        """
        leaves: Leaves = {}
        _walk(state, (), lambda path, tensor: leaves.setdefault(path, tensor))
        start = aligned(ALIGN + _HEADER_BYTES_EACH * len(leaves))
        records = self._places(leaves)
        table = _table(records, start, room)
        opened = self._tier.open(UNKNOWN_STEP, table)
        try:
            payload = Payload(
                "", (), Layout({}, values={str(n): leaves[path] for n, path in enumerate(records)}), b"", (), b""
            )
            fill(opened.arena, opened.slot, table, [(payload, False)])
        except BaseException:
            self._tier.drop(opened)
            raise
        views = self._views(opened, start, records)
        return dict(_walk(state, (), lambda path, _: views[path]))

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Staged | None:
        """The staged state of which one of these tensors is; None if there is none."""
        for staged in list(self._staged):
            if any(tensor.nbytes and staged.path(tensor) is not None for tensor in tensors.values()):
                return staged
        return None

    def wrote(self, staged: Staged, tensors: Mapping[str, torch.Tensor], records: tuple[TensorRecord, ...]) -> None:
        """Remember what a save gave this rank to write."""
        found = (staged.path(tensors[record.name]) for record in records)
        self._written = [path for path in found if path is not None]

    def _places(self, leaves: Leaves) -> dict[Path, TensorRecord]:
        """Where each tensor goes: first what was written last, as the file has it, then all others."""
        known = dict.fromkeys(path for path in self._written if path in leaves)
        at = 0
        places: dict[Path, TensorRecord] = {}
        for group in (list(known), [path for path in leaves if path not in known]):
            at = -(-at // 64) * 64
            # The order of the file: see payload.plan.
            for path in sorted(group, key=lambda path: -leaves[path].dtype.itemsize):
                leaf = leaves[path]
                dtype = str(leaf.dtype).removeprefix("torch.")
                places[path] = TensorRecord(str(len(places)), dtype, tuple(leaf.shape), at, leaf.nbytes, "")
                at += leaf.nbytes
        return places

    def _views(self, opened: Opened, start: int, records: dict[Path, TensorRecord]) -> Leaves:
        memory = opened.arena.image(opened.slot)
        base = opened.arena.address + opened.arena.offset(opened.slot)
        places = {(base + start + r.offset, r.bytes): path for path, r in records.items() if r.bytes}
        staged = Staged(opened, start, base, places)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        # Every tensor made of it holds on to the memory, and so to what is known of it.
        weakref.finalize(memory, self._forget, staged).atexit = False
        self._staged = [*self._staged, staged]
        return {path: _view(whole, start, record) for path, record in records.items()}

    def _forget(self, staged: Staged) -> None:
        self._staged = [other for other in self._staged if other is not staged]
        self._tier.drop(staged.opened)


def _view(whole: torch.Tensor, start: int, record: TensorRecord) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, record.dtype)
    if not record.bytes:
        return torch.empty(record.shape, dtype=dtype)
    return whole[start + record.offset :][: record.bytes].view(dtype).view(record.shape)


def _table(records: Mapping[Path, TensorRecord], start: int, room: int) -> Table:
    end = max((record.offset + record.bytes for record in records.values()), default=0)
    place = Place("", (), (), tuple(records.values()), start, end, start + end + room, 0, False)
    return Table(0, 1, (), (place,))


def _walk(value: Any, path: Path, found: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    """The value with what ``found`` makes of its plain tensors; what is no tensor is copied."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, path, found)
    if type(value) in (list, tuple):
        return type(value)(_walk(item, (*path, index), found) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        return {key: _walk(item, (*path, key), found) for key, item in value.items()}
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _tensor(tensor: torch.Tensor, path: Path, found: Callable[[Path, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        inner = {
            n: _tensor(part, (*path, n), found) if isinstance(part, torch.Tensor) else part for n, part in parts.items()
        }
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise NotPlain(f"{'.'.join(map(str, path))} is a {type(tensor).__name__}")
    return found(path, tensor.detach())
