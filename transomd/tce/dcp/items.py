"""What one rank writes of a plan: tensors, and values as the bytes of what torch.save makes of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from transomd.tce.dcp import staging
from transomd.tce.dcp.values import check_loadable
from transomd.tce.errors import CheckpointError


@dataclass(init=False)
class Items:
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

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, as they are, values last; CheckpointError if one is not what was announced."""
        ordered = sorted(self.like, key=self.values.__contains__)
        return {name: staging.expected(self.bring(name), self.like[name], name) for name in ordered}

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
