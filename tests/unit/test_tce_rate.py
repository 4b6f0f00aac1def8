"""Caps on bytes per second: exact by any clock, shared by threads, and off unless asked for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tce_keepers import own_place
from tce_nodes import nodes, on, pair

from transomd.launch.keeping import _rates
from transomd.spec import JobSpec
from transomd.tce import CheckpointEngine
from transomd.tce.image import FileImage, PartImage
from transomd.tce.manifest import FileRecord
from transomd.tce.rate import CHUNK, REPLICA, STORAGE, Cap, TokenBucket
from transomd.tce.replicate.peer import TIMEOUT_S


class Clock:
    """Time that passes while somebody sleeps, and not else."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_lets_so_much_pass_and_after_a_pause_no_more_than_a_burst() -> None:
    bucket = TokenBucket(rate=100, burst=50)
    assert bucket.take(100, 0.0) == 1.0
    assert bucket.take(100, 1.0) == 1.0
    assert bucket.take(50, 1.5) == 1.0
    assert bucket.take(50, 1000.0) == 0.0
    assert bucket.take(100, 1000.0) == 1.0
    assert bucket.take(100, 999.0) == 2.0  # a clock that was set back


@pytest.mark.parametrize("size", [1, 777, 5000])
def test_over_time_it_is_the_rate_whatever_the_pieces(size: int) -> None:
    clock = Clock()
    cap = Cap(10_000, clock, clock.sleep)
    for _ in range(200_000 // size):
        cap.wait(size)
    assert clock.now - 100.0 == pytest.approx(20.0, rel=0.03)


def test_no_cap_and_a_lifted_one_let_all_pass(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    Cap(0, clock, clock.sleep).wait(1 << 40)
    Cap(10, clock, clock.sleep).wait(1 << 40, lambda: True)
    assert clock.now == 100.0
    assert (Cap.of({}, STORAGE).rate, Cap.of({STORAGE: "2K"}, STORAGE).rate) == (0, 2048)
    assert Cap.of({STORAGE: "fast"}, STORAGE).rate == 0
    assert "is 'fast', which is no number of bytes" in caplog.text


@pytest.mark.parametrize("rate", [1, 3, 1000, 50_000, 1 << 30])
def test_whoever_waits_for_portions_sees_some_come_all_the_time(rate: int) -> None:
    """Else the other side of a slow copy would take this one for gone, and a copy begun anew would come no further."""
    clock = Clock()
    content = memoryview(bytes(range(250)) * max(1, min(20 * rate, 1 << 20) // 250))
    moments, passed = [clock.now], b""
    for portion in Cap(rate, clock, clock.sleep).portions(content, lambda: False):
        passed += portion
        moments.append(clock.now)
    assert passed == content
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) <= max(0.25, 1 / rate) + 1e-6
    assert clock.now - 100.0 == pytest.approx(len(content) / rate, rel=0.01)
    assert list(Cap(0).portions(content, lambda: False)) == [content]


def test_a_wait_ends_when_the_cap_is_lifted() -> None:
    clock = Clock()
    Cap(10, clock, clock.sleep).wait(10_000, lambda: clock.now > 102.0)
    assert clock.now == pytest.approx(102.0, abs=0.2)


def image(known: bool, whole: bool) -> tuple[PartImage, bytes]:
    pieces = [b"h" * 100, bytes(range(256)) * ((2 * CHUNK + 512) // 256)]
    content = b"".join(pieces)
    record = FileRecord("x", len(content), "", ()) if known else None
    file = FileImage("x", len(content), (), lambda: pieces, record, memoryview(content) if whole else None)
    return PartImage("x", (0,), (), (file,)), content


@pytest.mark.parametrize(("known", "whole", "count"), [(True, False, 4), (True, True, 3), (False, False, 2)])
def test_an_image_passes_unchanged_and_in_pieces_where_its_digests_are_known(
    known: bool, whole: bool, count: int
) -> None:
    clock = Clock()
    part, content = image(known, whole)
    (file,) = Cap(CHUNK, clock, clock.sleep).through(part, lambda: False).files
    passed = [bytes(piece) for piece in file.pieces()]
    assert b"".join(passed) == content
    assert len(passed) == count
    assert clock.now - 100.0 == pytest.approx(len(content) / CHUNK, rel=0.01)
    assert Cap(0).through(part, lambda: False) is part


def test_a_job_s_file_says_how_fast() -> None:
    settings = {"storage_rate": "1.5M", "replica_rate": 4096}
    spec = JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint=settings)
    assert _rates(spec.model_dump(mode="json")) == {STORAGE: str(3 << 19), REPLICA: "4096"}
    plain = JobSpec(name="t", command="true", nodes=2, workdir="/")
    assert _rates(plain.model_dump(mode="json")) == {}
    for wrong in ("fast", 0, True, "-1"):
        with pytest.raises(ValueError, match="number of bytes per second such as 500M"):
            JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint={"storage_rate": wrong})


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


@pytest.mark.parametrize(("variable", "stage"), [(STORAGE, "storage"), (REPLICA, "replica")])
def test_keepers_keep_to_it(directory: Path, monkeypatch: pytest.MonkeyPatch, variable: str, stage: str) -> None:
    took = seconds_for(directory, monkeypatch, variable, "4M", stage)
    assert took > 0.8


@pytest.mark.slow
def test_a_copy_comes_through_however_low_the_cap_is(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of 4 MiB takes longer than a keeper waits for one that says nothing."""
    took = seconds_for(directory, monkeypatch, REPLICA, "300K", "replica")
    assert took > TIMEOUT_S


def seconds_for(directory: Path, monkeypatch: pytest.MonkeyPatch, variable: str, rate: str, stage: str) -> float:
    """How long 4 MiB take to reach a stage."""
    monkeypatch.setenv(variable, rate)
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1)
        began = time.monotonic()
        engine.save(1, {"x": torch.zeros(1 << 20)}).wait(stage, timeout=60)
        took = time.monotonic() - began
        assert n1.status()["replica_problem"] == ""
        engine.close()
    return took
