"""Any cut of a tensor into boxes, loaded through any other cut: each element comes from where it was, and once."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tce_keepers import own_place

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list  # noqa: E402

from transomd.tce.dcp import TransomStorageReader, TransomStorageWriter, tiers  # noqa: E402

Box = tuple[tuple[int, int], ...]
"""First and last + 1 of each dimension."""


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut a length into pieces, some of which may be empty."""
    inner = st.lists(st.integers(0, size), max_size=3).map(sorted)
    return inner.map(lambda points: list(zip([0, *points], [*points, size], strict=True)))


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """A shape, and two ways to cut it into boxes; a box that another one equals is left out, as DCP does."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    ways = []
    for _ in range(2):
        boxes: list[Box] = [()]
        for size in shape:
            boxes = [(*box, piece) for box in boxes for piece in draw(cuts(size))]
        ways.append(boxes)
    return shape, ways[0], ways[1]


def offsets(box: Box) -> tuple[int, ...]:
    return tuple(first for first, _ in box)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - first for first, end in box)


def part(tensor: Any, box: Box) -> Any:
    return tensor[tuple(slice(first, end) for first, end in box)]


class Planner:
    """Brings the boxes of a tensor, and takes them back."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.boxes: dict[tuple[int, ...], Any] = {}

    def resolve_data(self, item: WriteItem) -> Any:
        assert item.tensor_data is not None
        box = tuple((o, o + s) for o, s in zip(item.index.offset or (), item.tensor_data.chunk.sizes, strict=True))
        return part(self.tensor, box)

    def resolve_tensor(self, item: Any) -> Any:
        target = self.boxes[item.dest_index.offset]
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass


def save(writer: TransomStorageWriter, step: int, tensor: Any, boxes: Sequence[Box], ranks: int) -> None:
    """Save the boxes, dealt out to the ranks, by the calls that DCP makes."""
    writer.reset(str(step))
    properties = TensorProperties(dtype=tensor.dtype)
    chunks = [ChunkStorageMetadata(torch.Size(offsets(box)), torch.Size(sizes(box))) for box in boxes]
    items = [
        WriteItem(
            MetadataIndex("t", chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.shape),
        )
        for chunk in chunks
    ]
    plans = [writer.prepare_local_plan(SavePlan(items[rank::ranks])) for rank in range(ranks)]
    results = [
        writer.write_data(plan, Planner(tensor)).wait()  # type: ignore[arg-type]
        for plan in writer.prepare_global_plan(plans)
    ]
    writer.finish(Metadata({"t": TensorStorageMetadata(properties, tensor.shape, chunks)}), results)


def load(reader: TransomStorageReader, tensor: Any, boxes: Sequence[Box]) -> dict[Box, Any]:
    """Load into other boxes, by the calls that DCP makes; returns what they hold."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = Planner(tensor)
    chunks = [ChunkStorageMetadata(torch.Size(offsets(box)), torch.Size(sizes(box))) for box in boxes]
    planner.boxes = {chunk.offsets: torch.ones(chunk.sizes).to(tensor.dtype) for chunk in chunks}
    items = create_read_items_for_chunk_list("t", metadata.state_dict_metadata["t"], chunks)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])
    reader.read_data(plan, planner).wait()  # type: ignore[arg-type]
    return {box: planner.boxes[offsets(box)] for box in boxes}


def distinct(boxes: Sequence[Box]) -> list[Box]:
    """Where boxes begin alike, DCP tells them apart by nothing; only one of them can hold anything."""
    return list({offsets(box): box for box in sorted(boxes, key=lambda box: torch.Size(sizes(box)).numel())}.values())


def tensor_of(shape: tuple[int, ...], dtype: str) -> Any:
    """Every element another one, as far as the type has so many."""
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(getattr(torch, dtype))


def equal(one: Any, other: Any) -> bool:
    """Byte for byte."""
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(one.shape == other.shape and torch.equal(*raw)) if one.numel() else bool(one.shape == other.shape)


Grid = tuple[tuple[int, ...], list[Box], list[Box]]
TYPES = st.sampled_from(["int64", "bfloat16", "uint8", "float8_e4m3fn", "complex64", "bool", "float64"])


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 5), TYPES)
def test_any_cut_is_loaded_through_any_other(grid: Grid, ranks: int, dtype: str) -> None:
    shape, saved, wanted = grid
    tensor = tensor_of(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        save(TransomStorageWriter(folder, memory=False), 1, tensor, distinct(saved), ranks)
        for box, content in load(TransomStorageReader(folder), tensor, distinct(wanted)).items():
            assert equal(content, part(tensor, box)), box


def test_any_cut_in_memory_is_loaded_through_any_other() -> None:
    """Shapes, types and cuts change from step to step; each rank's shards, or none, lie in its own arena."""
    steps = itertools.count(1)
    with own_place() as place:
        writer = TransomStorageWriter(place, epoch=1, storage_every=10**6)

        @settings(max_examples=40, deadline=None)
        @given(grids(), TYPES)
        def check(grid: Grid, dtype: str) -> None:
            shape, saved, wanted = grid
            tensor, step = tensor_of(shape, dtype), next(steps)
            save(writer, step, tensor, distinct(saved), 3)
            reader = TransomStorageReader(place, step=step)
            for box, content in load(reader, tensor, distinct(wanted)).items():
                assert equal(content, part(tensor, box)), box
                assert "storage" not in reader.loaded_from

        check()
        tiers.close(place, 10.0, leave=True)
