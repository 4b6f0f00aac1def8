"""What a checkpoint holds, as a page: its parts, its types, and its tensors or the largest of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transom_cli.text import clip, plain, size, table
from transomd.tce.manifest import Part, StepManifest, TensorRecord

PARTS = ("PART", "WRITTEN BY", "LOADED BY", "SIZE", "TENSORS", "KEYS")
PART_LIMITS = (24, 12, 16, 10, 8, 0)
GROUPS = ("PARTS", "EACH LOADED BY", "SIZE", "TENSORS", "KEYS")
GROUP_LIMITS = (8, 16, 10, 8, 0)
TYPES = ("TYPE", "TENSORS", "SIZE")
TYPE_LIMITS = (16, 10, 0)
TENSORS = ("TENSOR", "TYPE", "SHAPE", "SIZE", "PART")
TENSOR_LIMITS = (1 << 16, 16, 40, 10, 0)
MANY_PARTS = 12
"""Parts above which those of like ranks and keys are told together."""
LARGEST = 10


class Held(NamedTuple):
    """A tensor of a part."""

    part: str
    tensor: TensorRecord


Wholes = Mapping[tuple[str, str], tuple[int, ...]]


def held(parts: Sequence[Part]) -> list[Held]:
    """Return every tensor of the parts, in their order."""
    return [Held(part.name, tensor) for part in parts for file in part.files for tensor in file.tensors]


def largest(tensors: Sequence[Held]) -> list[Held]:
    """Return the largest tensors, the largest first; of equals, the first that was written."""
    return sorted(tensors, key=lambda one: -one.tensor.bytes)[:LARGEST]


def part_table(manifest: StepManifest, parts: Sequence[Part], columns: int) -> list[str]:
    """Return a line a part; of many, a line for all that like ranks load and that have the same keys."""
    if len(parts) > MANY_PARTS:
        return _group_table(parts, manifest.world_size, columns)
    writers = {entry.name: entry.writer for entry in manifest.parts}
    rows = [
        (p.name, f"rank {writers[p.name]}", _loaders(p, manifest.world_size), size(p.bytes), _count(p), _keys(p))
        for p in parts
    ]
    return table(PARTS, rows, PART_LIMITS, columns)


def _group_table(parts: Sequence[Part], ranks: int, columns: int) -> list[str]:
    groups: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        loaders = _loaders(part, ranks) if len(part.ranks) in (0, ranks) else _some(len(part.ranks))
        groups.setdefault((loaders, _keys(part)), []).append(part)
    rows = [
        (str(len(like)), by, size(sum(p.bytes for p in like)), str(sum(int(_count(p)) for p in like)), keys)
        for (by, keys), like in groups.items()
    ]
    return table(GROUPS, rows, GROUP_LIMITS, columns)


def _some(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _loaders(part: Part, ranks: int) -> str:
    if len(part.ranks) == ranks:
        return "every rank"
    return f"rank {', '.join(map(str, part.ranks))}" if part.ranks else "any rank"


def _count(part: Part) -> str:
    return str(sum(len(file.tensors) for file in part.files))


def _keys(part: Part) -> str:
    return ", ".join(part.keys)


def type_table(tensors: Sequence[Held], columns: int) -> list[str]:
    """Return a line a type, the one with most bytes first, under a header; and all together."""
    found: dict[str, list[int]] = {}
    for one in tensors:
        found.setdefault(_type(one.tensor), []).append(one.tensor.bytes)
    rows = [
        (name, str(len(sizes)), size(sum(sizes))) for name, sizes in sorted(found.items(), key=lambda i: -sum(i[1]))
    ]
    total = ("all", str(len(tensors)), size(sum(one.tensor.bytes for one in tensors)))
    return table(TYPES, [*rows, total] if len(rows) > 1 else rows, TYPE_LIMITS, columns)


def tensor_table(tensors: Sequence[Held], wholes: Wholes, columns: int) -> list[str]:
    """One line a tensor; two where a name leaves no room for the rest, as every part of a name may tell it apart."""
    rows = [
        (one.tensor.name, _type(one.tensor), _shape(one, wholes), size(one.tensor.bytes), one.part) for one in tensors
    ]
    lines = table(TENSORS, rows, TENSOR_LIMITS, 0)
    if not columns or max(map(len, lines)) <= columns:
        return lines
    others = table(TENSORS[1:], [row[1:] for row in rows], TENSOR_LIMITS[1:], columns - 2)
    names = [TENSORS[0], *(plain(row[0]) for row in rows)]
    return [line for name, rest in zip(names, others, strict=True) for line in (clip(name, columns), f"  {rest}")]


def _shape(one: Held, wholes: Wholes) -> str:
    whole = wholes.get((one.part, one.tensor.name))
    return _sizes(one.tensor.shape) + (f" of {_sizes(whole)}" if whole is not None else "")


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _type(tensor: TensorRecord) -> str:
    """Values of torch.distributed.checkpoint lie among the tensors, as bytes with a note."""
    return "value" if tensor.note and tensor.dtype == "uint8" else tensor.dtype
