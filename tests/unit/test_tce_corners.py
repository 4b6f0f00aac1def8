"""Random states of every kind through the engine and through DCP: what comes back is what was saved, byte for byte."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tce_keepers import own_place

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.dcp import TransomStorageReader, TransomStorageWriter, tiers
from transomd.tce.portable import export, gather
from transomd.tce.portable.bring import read

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.int64, torch.int8, torch.uint8, torch.uint16),
)
NAMES = st.text("abc.@,#0", min_size=1, max_size=4)
"""Also what names of shards are made of."""
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits that the type may have."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.arange(count).add(seed).remainder(3).eq(0).view(shape)
    raw = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Of any type and shape, contiguous or not; sometimes twice, sharing its memory wholly or in part."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    made = tensor_of(draw(st.sampled_from(TYPES)), shape, draw(st.integers(0, 99)))
    form = draw(st.sampled_from(("as it is", "transposed", "every other", "tied", "parts of one", "parameter")))
    if form == "transposed":
        return made.t() if made.dim() == 2 else made.movedim(0, -1) if made.dim() else made
    if form == "every other" and made.dim():
        return made[::2]
    if form == "tied":
        return {"one": made, "other": made, "row": made[:1] if made.dim() else made}
    if form == "parts of one" and made.dim():
        return {"low": made[: len(made) // 2], "high": made[len(made) // 2 :], "all": made}
    if form == "parameter" and (made.is_floating_point() or made.is_complex()):
        return torch.nn.Parameter(made)
    return made


def nests(least: int) -> st.SearchStrategy[dict[str, Any]]:
    """Dicts, of at least so many items, and lists to some depth; at the top a dict."""

    def nested(node: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(node, max_size=3) | st.dictionaries(NAMES, node, min_size=least, max_size=3)

    return st.dictionaries(NAMES, st.recursive(tensors() | PLAIN, nested, max_leaves=6), min_size=1, max_size=4)


STATES, DCP_STATES = nests(0), nests(1)
"""DCP's own reader does not find an empty dict in a list that its own writer saved."""


def bits(value: Any) -> Any:
    """What can be compared: of a tensor its type, shape and bytes."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, torch.Tensor):
        whole = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
        return str(value.dtype), tuple(value.shape), bytes(whole.view(torch.uint8).tolist()) if whole.numel() else b""
    return value


def blank(value: Any) -> Any:
    """The same form without the content, as a program has it before it loads."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@contextmanager
def folder() -> Iterator[Path]:
    """In memory where it can be: hundreds of fsyncs on a busy disk take minutes."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tce-", dir=base) as place:
        yield Path(place)


# --------------------------------------------------------------------------------------------- the engine


@settings(max_examples=40, deadline=None)
@given(st.lists(STATES, min_size=1, max_size=3))
def test_the_engine_brings_back_from_storage_whatever_changed_between_saves(states: list[dict[str, Any]]) -> None:
    with folder() as place:
        engine = CheckpointEngine(place, rank=0, world_size=1, epoch=1, memory=False)
        for step, state in enumerate(states, 1):
            engine.save(step, state).wait(timeout=60)
            assert came_back(engine, step, state)


def test_the_engine_brings_back_from_memory_whatever_changed_between_saves() -> None:
    steps = itertools.count(1)
    with own_place() as place, CheckpointEngine(place, rank=0, world_size=1, epoch=1, storage_every=10**6) as engine:

        @settings(max_examples=40, deadline=None)
        @given(STATES)
        def check(state: dict[str, Any]) -> None:
            step = next(steps)
            assert engine.save(step, state).done("memory")
            assert came_back(engine, step, state)
            assert engine.resumed_from == "memory"

        check()


def came_back(engine: CheckpointEngine, step: int, state: dict[str, Any]) -> bool:
    """Into an empty state, and into one of the same form, whose tensors are filled in place."""
    empty: dict[str, Any] = {}
    filled = blank(state)
    assert (engine.load(empty), engine.load(filled)) == (step, step)
    return bool(bits(empty) == bits(state) == bits(filled))


# ------------------------------------------------------------------------------------------------- DCP


@settings(max_examples=30, deadline=None)
@given(DCP_STATES)
def test_dcps_own_reader_finds_what_ours_does_and_the_other_way_round(state: dict[str, Any]) -> None:
    with folder() as place:
        dcp.save(state, storage_writer=TransomStorageWriter(place / "ours", memory=False), checkpoint_id="1")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "theirs"))
        gathered = gather(list_checkpoints(place / "ours")[0].path).state
        export(gathered, place / "exported", "dcp")
        readers = [
            TransomStorageReader(place / "ours"),
            dcp.FileSystemReader(place / "theirs"),
            dcp.FileSystemReader(place / "exported"),
        ]
        assert [bits(loaded(state, reader)) for reader in readers] == [bits(state)] * 3
        assert bits(gathered) == bits(read(place / "theirs"))


def test_dcp_brings_back_from_memory_whatever_changed_between_saves() -> None:
    steps = itertools.count(1)
    with own_place() as place:
        writer = TransomStorageWriter(place, epoch=1, storage_every=10**6)

        @settings(max_examples=30, deadline=None)
        @given(DCP_STATES, st.booleans())
        def check(state: dict[str, Any], asynchronous: bool) -> None:
            step = str(next(steps))
            if asynchronous:
                dcp.async_save(state, storage_writer=writer, checkpoint_id=step).result()
            else:
                dcp.save(state, storage_writer=writer, checkpoint_id=step)
            reader = TransomStorageReader(place, step=int(step))
            assert bits(loaded(state, reader)) == bits(state)
            assert "storage" not in reader.loaded_from

        check()
        tiers.close(place, 10.0, leave=True)


def loaded(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    target: dict[str, Any] = blank(state)
    dcp.load(target, storage_reader=reader)
    return target
