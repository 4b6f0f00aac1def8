"""The parts that a rank loads, as one: what is under a key may lie in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from transomd.tce.errors import CheckpointError
from transomd.tce.layout import Layout
from transomd.tce.manifest import TensorRecord

Target = tuple[str, torch.Tensor]


class Reader(Protocol):
    """Hands out the tensors of a part by name."""

    def record(self, name: str) -> TensorRecord:
        """What is told of a tensor."""
        ...

    def peek(self, name: str) -> torch.Tensor:
        """The tensor, for reading at once."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A new tensor."""
        ...

    def fill(self, targets: Sequence[Target]) -> None:
        """Copy into plain tensors that share no memory."""
        ...


def join(layouts: Sequence[Layout]) -> tuple[Layout, dict[str, tuple[int, str]]]:
    """One layout of several parts, and for each name in it the number of its part and its name there.

    ``elsewhere`` says what is still in other parts than these.
    """
    whole, names, apart = Layout({}), {}, Counter[str]()
    for number, layout in enumerate(layouts):
        ours = {name: f"{number}:{name}" for name in layout.tensors.values()}
        names.update({mine: (number, name) for name, mine in ours.items()})
        whole.tree.update(layout.tree)
        whole.tensors.update({path: ours[name] for path, name in layout.tensors.items()})
        whole.arrays.update(layout.arrays)
        whole.shards.update({ours[name]: shard for name, shard in layout.shards.items()})
        whole.elsewhere.update(layout.elsewhere)
        apart.update(path[0] for path in layout.tensors if path[0] not in layout.tree)
    whole.elsewhere = {key: count - apart[key] for key, count in whole.elsewhere.items() if count != apart[key]}
    return whole, names


def check_whole(layout: Layout, keys: Iterable[str]) -> None:
    """CheckpointError if there are tensors of these keys in other parts than those that were joined."""
    lacking = [f"{key} ({count} tensors)" for key in keys if (count := layout.elsewhere.get(key))]
    if lacking:
        raise CheckpointError(
            f"what this rank holds together with others is not in the checkpoint: {', '.join(lacking)}",
            hint="name the same ranks in 'replicated' on each of them",
        )


class Joined:
    """Several parts as one, for reading: ``layout`` says what is in them."""

    def __init__(self, parts: Sequence[tuple[Layout, Reader]]) -> None:
        self.layout, self._names = join([layout for layout, _ in parts])
        self._readers = [reader for _, reader in parts]

    def record(self, name: str) -> TensorRecord:
        """What is told of a tensor."""
        number, own = self._names[name]
        return self._readers[number].record(own)

    def peek(self, name: str) -> torch.Tensor:
        """The tensor, for reading at once."""
        number, own = self._names[name]
        return self._readers[number].peek(own)

    def read(self, name: str) -> torch.Tensor:
        """A new tensor."""
        number, own = self._names[name]
        return self._readers[number].read(own)

    def fill(self, targets: Sequence[Target]) -> None:
        """Copy into plain tensors that share no memory, part by part."""
        of: dict[int, list[Target]] = {}
        for name, target in targets:
            number, own = self._names[name]
            of.setdefault(number, []).append((own, target))
        for number, its in of.items():
            self._readers[number].fill(its)
