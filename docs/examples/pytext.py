"""A text that every machine has: the sources of Python's own standard library, dealt out to the ranks in batches."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def standard_library() -> bytes:
    """The modules at the top of the standard library, one after the other, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")) if path.is_file())


class Batches:
    """This rank's batches of the text: windows in random order, every window of the rank once per pass.

    ``state_dict`` holds the exact place, so that a program that goes on from it sees what it would have seen.
    """

    def __init__(self, text: bytes, *, rank: int, world_size: int, size: int, length: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._starts = torch.arange(0, len(text) - length - 1, length)[rank::world_size]
        self._size, self._length = size, length
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        self._order = torch.randperm(len(self._starts), generator=self._generator)
        self._place = 0

    def next(self) -> Tensor:
        """The next batch: int64, (size, length + 1)."""
        if self._place + self._size > len(self._order):
            self._order = torch.randperm(len(self._starts), generator=self._generator)
            self._place = 0
        starts = self._starts[self._order[self._place : self._place + self._size]]
        self._place += self._size
        return self._text[starts[:, None] + torch.arange(self._length + 1)].long()

    def state_dict(self) -> dict[str, Any]:
        """The exact place in the text."""
        return {"generator": self._generator.get_state(), "order": self._order, "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state_dict`` told."""
        self._generator.set_state(state["generator"])
        self._order, self._place = state["order"], state["place"]
