"""What stands at the head of a slot. Written so that a process may be killed at any instruction of it.

A state is kept twice, each copy with a number and a checksum. A new state goes over the older copy: whatever is cut off
halfway does not match its checksum, and the state before it is still in force.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

EMPTY, WRITING, STAGED = 0, 1, 2
_FORM = struct.Struct("<8sQQQqqQQQ")
_MAGIC = b"tceslot1"
_SUM = struct.Struct("<Q")
_COPY = 2048
Memory = memoryview


@dataclass(frozen=True)
class SlotState:
    """One slot: EMPTY, WRITING or STAGED; ``seq`` counts the saves of the rank; where the table of its files lies."""

    state: int = EMPTY
    seq: int = 0
    step: int = 0
    epoch: int = 0
    table_offset: int = 0
    table_bytes: int = 0
    table_digest: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """What slots are ordered by, oldest first."""
        return self.epoch, self.step, self.seq


def read_slot(memory: Memory, base: int) -> SlotState:
    """The state in force at ``base``; EMPTY where none was ever written."""
    return _newest(memory, base)[1]


def write_slot(memory: Memory, base: int, state: SlotState) -> None:
    """Put a new state in force."""
    number = _newest(memory, base)[0] + 1
    told = (state.state, state.seq, state.step, state.epoch, state.table_offset, state.table_bytes, state.table_digest)
    content = _FORM.pack(_MAGIC, number, *told)
    place = base + (number % 2) * _COPY
    memory[place : place + _FORM.size + _SUM.size] = content + _SUM.pack(xxh3_64_intdigest(content))


def _newest(memory: Memory, base: int) -> tuple[int, SlotState]:
    return max(_copy(memory, base), _copy(memory, base + _COPY), key=lambda copy: copy[0])


def _copy(memory: Memory, place: int) -> tuple[int, SlotState]:
    content = bytes(memory[place : place + _FORM.size + _SUM.size])
    head, total = content[: _FORM.size], _SUM.unpack(content[_FORM.size :])[0]
    magic, number, *told = _FORM.unpack(head)
    if magic != _MAGIC or total != xxh3_64_intdigest(head):
        return 0, SlotState()
    return number, SlotState(*told)
