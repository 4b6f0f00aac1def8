"""Copying with several threads: every byte arrives, at any size, whatever the helpers do."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transomd.tce import CheckpointEngine, crew
from transomd.tce.files import CHUNK, write_file
from transomd.tce.memory import move as moving
from transomd.tce.memory.move import Run, move


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def _moved(sizes: list[int]) -> tuple[bytes, bytes]:
    source, target = bytearray(os.urandom(sum(sizes))), bytearray(sum(sizes))
    begin = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (target, source)]
    at, runs = 0, list[Run]()
    for size in sizes:
        runs.append((begin[0] + at, begin[1] + at, size))
        at += size
    move(runs)
    return bytes(source), bytes(target)


@pytest.mark.parametrize("cpus", [1, 2, 64])
def test_every_byte_arrives(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(moving, "_CHUNK", 1000)
    source, target = _moved([0, 1, 999, 1000, 1001, 123_457, 0, 7])
    assert source == target


def test_a_rank_takes_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert crew.threads() == crew.MOST_THREADS
    for ranks, share in {"2": 3, "3": 2, "6": 1, "64": 1, "0": 4, "none": 4}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert crew.threads() == share


def test_without_helpers_the_caller_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def submit(self, *_: object) -> None:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(crew, "_pool", lambda _: Ended())
    source, target = _moved([20 << 20])
    assert source == target


def test_no_helper_is_at_work_any_more_when_work_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    begun, ended, own = threading.Event(), [], threading.current_thread()

    def work(items: Iterator[int]) -> list[None]:
        next(items)
        if threading.current_thread() is own:
            assert begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.2)
        ended.append(list(items))
        return []

    with pytest.raises(KeyboardInterrupt):
        crew.together(range(1000), work)
    assert ended == [[]], "a helper goes on, or takes more"


@pytest.mark.parametrize("memory", [True, False])
def test_targets_that_share_memory_end_as_they_would_one_after_the_other(tmp_path: Path, memory: bool) -> None:
    with CheckpointEngine(tmp_path / "c", rank=0, world_size=1, memory=memory) as engine:
        engine.save(1, {"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 2.0)}).wait("storage", timeout=60)
        one = torch.zeros(1000)
        state = {"a": one, "b": one.view(1000)}
        version = one._version
        assert engine.load(state) == 1
    assert one.eq(2.0).all()
    assert one._version > version, "autograd does not see that the tensor was changed"


@pytest.mark.parametrize("memory", [True, False])
def test_a_tied_weight_is_filled_once_and_beside_the_others(tmp_path: Path, memory: bool) -> None:
    tied = torch.arange(1000.0)
    saved = {"in": tied, "out": tied, "other": torch.arange(7.0), "none": torch.empty(0), "scalar": torch.tensor(3.5)}
    with CheckpointEngine(tmp_path / "c", rank=0, world_size=1, memory=memory) as engine:
        engine.save(1, saved).wait("storage", timeout=60)
        own = torch.zeros(1000)
        state = {"in": own, "out": own, **{name: torch.zeros_like(saved[name]) for name in ("other", "none", "scalar")}}
        assert engine.load(state) == 1
    assert state["in"] is own
    assert state["out"] is own
    assert all(state[name].equal(tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 4096, 2 * CHUNK + 12_345])
def test_what_is_written_past_the_page_cache_is_whole(tmp_path: Path, size: int) -> None:
    """From memory that begins at a page, as a slot does, and from memory that does not."""
    memory = torch.randint(256, (size + 8192,), dtype=torch.uint8)
    page = -memory.data_ptr() % 4096
    for begin in (page, page + 64):
        content = memoryview(memory.numpy())[begin : begin + size]
        write_file(tmp_path / "f", size, [content])
        assert (tmp_path / "f").read_bytes() == content


kernel = pytest.mark.skipif(moving.stream() is None, reason="the copy kernel was not built here")


@kernel
@pytest.mark.parametrize("to", [0, 1, 15, 63])
@pytest.mark.parametrize("source", [0, 3, 32])
def test_the_kernel_copies_what_it_is_told_and_no_byte_more(to: int, source: int) -> None:
    copy = moving.stream()
    assert copy is not None
    for size in (0, 1, 63, 64, 65, 127, 4096 + 17, 1 << 20):
        given, target = bytearray(os.urandom(source + size + 8)), bytearray(b"\x55" * (to + size + 200))
        at, start = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (target, given))
        copy(at + to, start + source, size)
        assert target == b"\x55" * to + given[source : source + size] + b"\x55" * 200


@pytest.mark.parametrize("kernel_is_there", [pytest.param(True, marks=kernel), False])
def test_with_the_kernel_or_without_every_byte_arrives(kernel_is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel_is_there:
        monkeypatch.setattr(moving, "stream", lambda: None)
    source, target = _moved([moving._SHORT, moving._SHORT + 1, 12 << 20, 5])
    assert source == target


def test_a_library_that_is_none_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / moving.LIBRARY).write_bytes(b"no library")
    monkeypatch.setattr(moving, "__file__", str(tmp_path / "move.py"))
    moving.stream.cache_clear()
    try:
        assert moving.stream() is None
    finally:
        moving.stream.cache_clear()
