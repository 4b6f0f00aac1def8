"""The memory tier on real keepers and signals: what a save promises, whoever dies or hangs after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
import torch
from tce_keepers import SOON_S, arena_of, keeper_of, keepers, newest_slot, own_place, stop, wait_for

from transomd.tce import CheckpointEngine, CheckpointError, restore
from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.epochs import claim_epoch
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.arena import Arena, staged
from transomd.tce.memory.link import call, connect, hello
from transomd.tce.memory.place import own_socket
from transomd.tce.memory.table import Table


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def state_of(step: int, rank: int = 0, size: int = 5000) -> dict[str, Any]:
    """Every part says which step and rank it is of."""
    return {
        "model": {str(index): torch.full((size,), float(step)) for index in range(4)},
        "turned": torch.full((3, 4), step, dtype=torch.int64).t(),
        "mine": [torch.full((2,), 100 * step + rank), {"step": step}],
    }


def assert_is(state: dict[str, Any], step: int, rank: int = 0) -> None:
    assert all(bool(tensor.eq(step).all()) for tensor in (*state["model"].values(), state["turned"]))
    assert bool(state["mine"][0].eq(100 * step + rank).all())
    assert state["mine"][1] == {"step": step}


def loaded(directory: Path, **settings: Any) -> int | None:
    """The newest step, all of whose values were right."""
    state = state_of(0, 99)
    step = CheckpointEngine(directory, **settings).load(state)
    if step is not None:
        assert_is(state, step, settings.get("rank", 0))
    return step


def status_of(directory: Path) -> dict[str, Any]:
    """What the keeper says of the only rank, as ``transom status`` shows it."""
    return status_of_all(directory)[0]


def status_of_all(directory: Path) -> list[dict[str, Any]]:
    """What the keeper says of each rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(str(own_socket(directory)))
        sock.sendall(b'{"id": 1, "op": "status"}\n')
        with sock.makefile("rb") as answer:
            return list(json.loads(answer.readline())["ranks"])


def complete(directory: Path) -> list[int]:
    return sorted(c.step for c in list_checkpoints(directory) if c.complete)


def program(code: str, directory: Path, **settings: Any) -> subprocess.Popen[str]:
    """A program with an engine and, in ``state_of``, states of its steps."""
    head = f"""
        import os, signal, sys, time, torch
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tce_memory import state_of
        from transomd.tce import CheckpointEngine
        engine = CheckpointEngine({str(directory)!r}, **{settings!r})
    """
    text = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed(process: subprocess.Popen[str]) -> bool:
    """Whether it killed itself."""
    told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, told
    return True


@pytest.fixture
def stalled() -> Iterator[list[int]]:
    """Processes that a test stopped; they go on at its end."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)


def test_a_save_is_in_memory_at_once_and_on_the_disk_soon(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    handle = engine.save(1, state_of(1))
    assert handle.done("memory")
    handle.wait("memory")
    handle.wait("storage", timeout=60)
    assert complete(directory) == [1]
    assert verify(list_checkpoints(directory)[0].path) == []
    with pytest.raises(CheckpointError, match="no keeper on another node is known"):
        handle.wait("replica")
    assert (engine.saved, engine.failed, engine.skipped, engine.memory_reason) == (1, 0, 0, "")
    engine.close()


def test_every_save_reaches_storage_where_storage_keeps_up(directory: Path) -> None:
    with CheckpointEngine(directory, keep=50) as engine:
        handles = []
        for step in range(1, 21):
            handles.append(engine.save(step, state_of(step)))
            if step % 2 == 0:
                handles[-1].wait(timeout=60)
    assert complete(directory) == list(range(1, 21))
    assert engine.skipped == 0
    assert all(verify(c.path) == [] for c in list_checkpoints(directory))


def test_what_changes_after_save_does_not_leak_in(directory: Path) -> None:
    engine, state = CheckpointEngine(directory), state_of(1)
    handle = engine.save(1, state)
    state["model"]["0"].fill_(-1)
    state["turned"].zero_()
    state["mine"][1]["step"] = -1
    handle.wait(timeout=60)
    assert loaded(directory) == 1
    engine.close()
    assert loaded(directory) == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_type_and_form_come_back_from_memory_and_from_storage(directory: Path) -> None:
    names = "bool uint8 int16 bfloat16 float16 float32 float64 complex64 complex32 float8_e5m2 float8_e4m3fn uint64"
    state: dict[str, Any] = {}
    for name in names.split():
        bits = torch.randint(0, 2 if name == "bool" else 256, (48,), dtype=torch.uint8)
        matrix = bits.view(getattr(torch, name)).clone()
        matrix = matrix[: matrix.numel() // 6 * 6].reshape(-1, 6) if matrix.numel() >= 6 else matrix
        state[name] = [matrix, matrix.t(), matrix[:, 1:3], matrix[:0], matrix[0, 0], matrix[:1].expand(3, -1)]
    base = torch.arange(10.0)
    state["shared"] = [base, base, base[3:], torch.complex(base, -base).conj(), torch._neg_view(base)]
    engine = CheckpointEngine(directory)
    handle = engine.save(1, state)
    back: list[dict[str, Any]] = [{}, {}]
    CheckpointEngine(directory).load(back[0])
    handle.wait(timeout=60)
    engine.close()
    assert wait_for(lambda: not keepers(directory.parent))
    CheckpointEngine(directory).load(back[1])
    for key, tensors in state.items():
        for index, tensor in enumerate(tensors):
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            for there in back:
                assert there[key][index].dtype == plain.dtype
                assert there[key][index].shape == plain.shape
                same = there[key][index].reshape(-1).view(torch.uint8) == plain.reshape(-1).view(torch.uint8)
                assert bool(same.all()), (key, index)


def test_changed_shapes_and_new_keys_and_a_state_that_outgrows_its_arena(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    for step, size in ((1, 1000), (2, 500_000), (3, 10), (4, 900_000)):
        engine.save(step, {"t": torch.full((size,), float(step)), f"k{step}": torch.zeros(step)}).wait(timeout=60)
        state: dict[str, Any] = {}
        assert CheckpointEngine(directory).load(state) == step
        assert state["t"].shape == (size,)
        assert bool(state["t"].eq(step).all())
    engine.close()
    assert complete(directory) == [2, 3, 4]


def test_the_program_dies_right_after_save_and_nothing_is_lost(directory: Path) -> None:
    code = "engine.save(1, state_of(1)); engine.save(2, state_of(2)); os.kill(os.getpid(), signal.SIGKILL)"
    assert killed(program(code, directory))
    assert loaded(directory) == 2
    assert wait_for(lambda: complete(directory) and complete(directory)[-1] == 2)


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise RuntimeError('mine')", "pass", "os.kill(os.getpid(), 15)"])
def test_however_the_program_ends_its_last_step_is_stored(directory: Path, end: str) -> None:
    done = program(f"engine.save(7, state_of(7))\n{end}", directory)
    done.communicate(timeout=60)
    assert wait_for(lambda: complete(directory) == [7])
    assert loaded(directory) == 7


def test_a_new_start_finds_what_the_old_one_staged_while_storage_failed(directory: Path) -> None:
    """Something is in the way of the directory, until after the program is dead."""
    code = """
        engine.save(1, state_of(1)).wait(timeout=60)
        os.rename(engine.directory, str(engine.directory) + ".gone")
        Path(engine.directory).write_text("in the way")
        engine.save(2, state_of(2)); engine.save(3, state_of(3))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert killed(program(code, directory))
    directory.unlink()
    Path(f"{directory}.gone").rename(directory)
    assert loaded(directory) == 3
    assert wait_for(lambda: complete(directory)[-1] == 3)


def test_a_full_disk_is_tried_again_until_there_is_room(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        ballast = directory / "ballast"
        ballast.write_bytes(bytes(900 << 10))
        with CheckpointEngine(directory) as engine:
            handle = engine.save(1, state_of(1, size=20000))
            with pytest.raises(TimeoutError, match=r"No space left on device: needs \d+ bytes, \d+ bytes free"):
                handle.wait(timeout=1)
            assert handle.error is None
            ballast.unlink()
            handle.wait(timeout=60)
        assert "it stays in memory, and writing is tried again" in caplog.text
        assert loaded(directory) == 1
        assert wait_for(lambda: not keepers(directory.parent))
    finally:
        subprocess.run(["umount", directory], check=True)


def test_saves_faster_than_storage_skip_and_say_so(
    directory: Path, stalled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A keeper that stands still: saves go on without it, and the last one is stored when it goes on."""
    engine = CheckpointEngine(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    stalled.append(keeper_of(directory))
    stop(stalled[0])
    begun = time.monotonic()
    handles = [engine.save(step, state_of(step)) for step in range(2, 30)]
    assert time.monotonic() - begun < SOON_S
    assert engine.skipped > 20
    with pytest.raises(CheckpointError, match="step 3 was not written to storage, which is slower than the saves"):
        handles[1].wait(timeout=60)
    assert "skipped so far" in caplog.text
    assert all(handle.done("memory") for handle in handles)
    os.kill(stalled[0], signal.SIGCONT)
    handles[-1].wait(timeout=60)
    engine.save(30, state_of(30)).wait(timeout=60)
    assert status_of(directory)["skipped"] == engine.skipped
    engine.close()
    assert loaded(directory) == 30
    assert all(verify(c.path) == [] for c in list_checkpoints(directory) if c.complete)


def test_a_step_that_storage_is_not_to_get_is_none_that_was_skipped(directory: Path) -> None:
    with CheckpointEngine(directory, storage_every=4) as engine:
        for step in range(1, 5):
            handle = engine.save(step, state_of(step))
        handle.wait(timeout=60)
        assert (engine.skipped, status_of(directory)["skipped"]) == (0, 0)


def test_the_policy_wait_waits_and_skips_nothing(directory: Path) -> None:
    with CheckpointEngine(directory, keep=100, when_full="wait") as engine:
        for step in range(1, 31):
            engine.save(step, state_of(step))
    assert complete(directory) == list(range(1, 31))
    assert engine.skipped == 0


def test_the_keeper_dies_and_the_training_goes_on(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = CheckpointEngine(directory, keep=9)
    engine.save(1, state_of(1)).wait(timeout=60)
    stop(keeper_of(directory))
    lost = engine.save(2, state_of(2))
    os.kill(keeper_of(directory), signal.SIGKILL)
    assert wait_for(lambda: not keepers(directory.parent))
    handle = engine.save(3, state_of(3))
    assert handle.done("memory")
    handle.wait(timeout=60)
    assert "the keeper was lost" in caplog.text
    assert lost.done("memory")
    assert loaded(directory) == 3
    engine.close()
    assert complete(directory)[-1] == 3


def test_a_save_is_stored_also_where_a_load_was_what_saw_that_the_keeper_had_died(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    os.kill(keeper_of(directory), signal.SIGKILL)
    assert wait_for(lambda: not keepers(directory.parent))
    assert engine.load(state_of(0)) == 1
    engine.save(2, state_of(2)).wait(timeout=60)
    engine.close()


def test_a_slot_that_is_being_copied_into_stays_so_when_another_keeper_takes_over(directory: Path) -> None:
    """Else another thread's save is given the same slot, and what is published is a mix of both."""
    with CheckpointEngine(directory, keep=9) as engine:
        handle = engine.save(1, state_of(1))
        handle.wait(timeout=60)
        tier = engine._memory
        assert tier is not None
        table = Table(0, 1, (), ())
        first = tier.open(2, table)
        os.kill(keeper_of(directory), signal.SIGKILL)
        assert wait_for(lambda: not keepers(directory.parent))
        assert wait_for(lambda: not tier.progress(1) and bool(keepers(directory.parent)) and not tier.reason)
        second = tier.open(3, table)
        assert second.arena is first.arena
        assert second.slot != first.slot
        first.arena.image(first.slot)[:5] = b"still"
        tier.drop(first)
        tier.drop(second)


def test_an_arena_that_was_outgrown_is_there_as_long_as_somebody_copies_into_it(directory: Path) -> None:
    with CheckpointEngine(directory, keep=9) as engine:
        engine.save(1, state_of(1)).wait(timeout=60)
        tier = engine._memory
        assert tier is not None
        first = tier.open(2, Table(0, 1, (), ()))
        engine.save(3, state_of(3, size=500_000)).wait(timeout=60)
        first.arena.image(first.slot)[:5] = b"still"
        with pytest.raises(OSError, match="was replaced"):
            tier.publish(first, 2, Table(0, 1, (), ()), SaveHandle(2, lambda: False))
        assert first.arena.descriptor == -1, "and gone then"


def test_a_keeper_outlives_who_reads_the_memory_of_a_rank_that_is_done(directory: Path) -> None:
    read, other, unread = (CheckpointEngine(directory, rank=rank, world_size=3, epoch=1) for rank in range(3))
    for handle in [each.save(1, state_of(1, each.rank)) for each in (read, other, unread)]:
        handle.wait(timeout=60)
    reader = call(directory, 0, 3, start=False)
    assert reader is not None
    answer, descriptors = reader.ask("hold", epoch=1, step=1)
    assert answer["slots"]
    hello(reader, directory, 1, 3)  # it goes on to another rank's share
    read.close()
    unread.close()
    pid = keeper_of(directory)
    # The keeper looks at both at once: when it gives back what nobody reads, it has passed over what is read.
    assert wait_for(lambda: [told["rank"] for told in status_of_all(directory)] == [0, 1])
    reader.tell("release")
    reader.close()
    for descriptor in descriptors:
        os.close(descriptor)
    assert wait_for(lambda: [told["rank"] for told in status_of_all(directory)] == [1])
    assert keepers(directory.parent) == [pid]
    other.close()


def test_a_handle_finds_another_keeper_by_itself(directory: Path) -> None:
    """What was staged when the keeper died is in the program's own mapping: the next keeper gets it from there."""
    engine = CheckpointEngine(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    pid = keeper_of(directory)
    stop(pid)
    handle = engine.save(2, state_of(2))
    os.kill(pid, signal.SIGKILL)
    handle.wait(timeout=60)
    assert complete(directory)[-1] == 2
    engine.close()


def test_a_flipped_bit_in_memory_is_seen_and_the_next_is_used(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CheckpointEngine(directory)
    for step in (1, 2):
        engine.save(step, state_of(step)).wait(timeout=60)
    arena = arena_of(engine._memory)
    slot = newest_slot(arena)
    arena.image(slot)[arena.state(slot).table_offset // 2] ^= 4
    # Storage has the same step, undamaged.
    assert loaded(directory) == 2
    assert "step 2 of epoch 1 is damaged in memory: memory of rank 0: tensor" in caplog.text
    caplog.clear()
    assert loaded(directory) == 2, "and what is damaged is not looked at again"
    assert "damaged" not in caplog.text
    engine.close()


def test_a_damaged_copy_that_is_nowhere_else_gives_way_to_the_older_one(directory: Path) -> None:
    engine = CheckpointEngine(directory, epoch=1)
    engine.save(1, state_of(1)).wait(timeout=60)
    handle = engine.save(2, state_of(2))
    handle.wait(timeout=60)
    newest = list_checkpoints(directory)[0].path
    (newest / "manifest.json").unlink()
    arena = arena_of(engine._memory)
    slot = newest_slot(arena)
    arena.image(slot)[arena.state(slot).table_offset // 2] ^= 4
    assert loaded(directory, epoch=2) == 1
    engine.close()


def test_loading_from_memory_fills_tensors_in_place_and_keeps_nothing_of_the_keepers(directory: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    engine = CheckpointEngine(directory)
    engine.save(1, {"model": model, "optimizer": optimizer, "loose": torch.ones(9)})
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    second = torch.optim.AdamW(other.parameters())
    places = [parameter.data_ptr() for parameter in other.parameters()]
    state: dict[str, Any] = {"model": other, "optimizer": second, "loose": None}
    assert CheckpointEngine(directory).load(state) == 1
    for step in (2, 3, 4, 5):
        # Every slot is written over; what was loaded must not change.
        engine.save(step, {"model": torch.nn.Linear(30, 30), "optimizer": torch.full((300,), float(step)), "loose": 0})
    engine.close()
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert all(value.equal(wanted[name]) for name, value in other.state_dict().items())
    moments = optimizer.state_dict()["state"]
    assert all(second.state_dict()["state"][k]["exp_avg"].equal(moments[k]["exp_avg"]) for k in moments)
    assert bool(state["loose"].eq(1).all())


def test_without_room_save_says_so_once_and_writes_to_storage(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_MEMORY", "64K")
    with CheckpointEngine(directory) as engine:
        for step in (1, 2, 3):
            # What is free changes all the time, and is no new reason.
            handle = engine.save(step, state_of(step, size=5000 + 1000 * step))
            assert handle.done("storage")
            assert not handle.done("memory")
    told = [record.message for record in caplog.records if "no memory for a copy" in record.message]
    assert len(told) == 1
    assert "needs 2." in told[0]
    assert "limit 64.0 KiB (TRANSOM_CHECKPOINT_MEMORY); free" in told[0]
    assert "limit 64.0 KiB" in engine.memory_reason
    assert complete(directory) == [1, 2, 3]


def test_a_late_process_of_an_earlier_start_cannot_touch_what_the_new_one_stages(directory: Path) -> None:
    late = CheckpointEngine(directory, epoch=1)
    late.save(1, state_of(1)).wait(timeout=60)
    new = CheckpointEngine(directory, epoch=2)
    new.save(2, state_of(2)).wait(timeout=60)
    handle = late.save(50, state_of(50))
    with pytest.raises(CheckpointError, match=r"fenced|taken over"):
        handle.wait(timeout=60)
    for step in (3, 4, 5):
        new.save(step, state_of(step))
        late.save(50 + step, state_of(50 + step))
    assert loaded(directory, epoch=2) == 5
    new.close()
    late.close()
    # Nobody has waited for it: the late one has taken the keeper's word away from the new one.
    assert wait_for(lambda: complete(directory)[-1] == 5)


def test_a_start_takes_no_epoch_that_memory_alone_knows_of(directory: Path) -> None:
    with CheckpointEngine(directory, storage_every=1000) as engine:
        engine.save(1, state_of(1))
        assert not list(directory.glob("*.claim")), "storage knows of it already"
        with CheckpointEngine(directory) as other:
            assert (engine.epoch, other.epoch) == (1, 2)


def test_what_only_memory_holds_is_stored_by_the_start_that_resumed_from_it(directory: Path) -> None:
    code = """
        engine.save(1, state_of(1)).wait(timeout=60)
        engine.save(2, state_of(2))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert killed(program(code, directory, epoch=1))
    engine = CheckpointEngine(directory, epoch=2)
    state = state_of(0)
    assert engine.load(state) == 2
    assert_is(state, 2)
    assert wait_for(lambda: complete(directory)[-1] == 2)
    engine.close()


FENCED = """
    from tce_keepers import keeper_of, stop
    engine.save(1, state_of(1)).wait(timeout=60)
    stop(keeper_of(engine.directory))
    engine.save(2, state_of(2))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def only_in_memory(directory: Path, stalled: list[int]) -> CheckpointEngine:
    """A start that finds step 2 in the memory of its node alone: storage got none of an epoch that was fenced."""
    assert killed(program(FENCED, directory, epoch=1))
    stalled.append(keeper_of(directory))
    claim_epoch(directory, 2)
    os.kill(stalled[0], signal.SIGCONT)
    assert wait_for(lambda: "epoch" in status_of(directory)["problem"]), "storage got a step of a fenced epoch"
    return CheckpointEngine(directory, epoch=3)


def test_nothing_waits_for_a_later_start_once_it_has_come(directory: Path, stalled: list[int]) -> None:
    engine = only_in_memory(directory, stalled)
    assert engine.load(state_of(0)) == 2
    engine.close()
    assert wait_for(lambda: not keepers(directory.parent))


def test_a_step_that_another_rank_reads_is_stored_by_the_start_that_resumed_from_it(
    directory: Path, stalled: list[int]
) -> None:
    engine = only_in_memory(directory, stalled)
    folder = Path(f"/proc/{stalled[0]}/fd")
    path, *_ = [link for link in folder.iterdir() if os.readlink(link).startswith("/memfd:transom:rank-0")]
    arena = Arena(os.open(path, os.O_RDWR))
    _, slot, state = next(staged([arena]))
    assert arena.acquire(slot, state.seq)
    assert engine.load(state_of(0)) == 2
    assert wait_for(lambda: complete(directory)[-1] == 2)
    arena.release(slot)
    arena.close()
    engine.close()


def test_two_ranks_hold_what_is_replicated_once_a_node(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"world_size": 2, "epoch": 1, "replicated": ("model",)}
    ranks = []
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.append(CheckpointEngine(directory, rank=rank, **settings))
    handles = []
    for rank, engine in enumerate(ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        handles.append(engine.save(1, state_of(1, rank, size=100_000)))
    for handle in handles:
        handle.wait(timeout=60)
    sizes = [arena_of(engine._memory).slot_bytes for engine in ranks]
    assert sizes[0] > 1_600_000
    assert sizes[1] < 20_000
    recall = ranks[1]._memory.recall() if ranks[1]._memory else None
    assert recall is not None
    assert recall.steps == [(1, 1)]
    assert recall.problems(1, 1) == []
    assert sorted(key for layout, _ in recall.opened() for key in layout.keys) == ["mine", "model", "turned"]
    recall.release()
    for engine in ranks:
        engine.close()


def test_two_hundred_saves_take_no_more_memory_than_twenty(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    sizes = []
    for step in range(200):
        engine.save(step, state_of(step, size=50_000))
        if step % 20 == 19:
            sizes.append(max(resident(os.getpid()), 0) + resident(keeper_of(directory)))
    engine.close()
    # What is lost is lost with each save; an allocator may take a few MiB once, whenever it likes.
    assert median(after - before for before, after in pairwise(sizes)) < 0.3, sizes
    assert sizes[-1] - sizes[0] < 24, sizes
    assert len(os.listdir("/proc/self/fd")) < 40


def resident(pid: int) -> float:
    """MiB of a process that are its own (not the arena)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_a_forked_child_leaves_the_memory_tier_alone(directory: Path) -> None:
    engine = CheckpointEngine(directory)
    engine.save(1, state_of(1)).wait(timeout=60)
    child = os.fork()
    if child == 0:
        engine.close()
        os._exit(0)
    os.waitpid(child, 0)
    handle = engine.save(2, state_of(2))
    assert handle.done("memory")
    handle.wait(timeout=60)
    engine.close()


def test_sigterm_lets_the_keeper_finish(directory: Path) -> None:
    engine = CheckpointEngine(directory, when_full="wait")
    for step in range(1, 6):
        engine.save(step, state_of(step, size=200_000))
    pid = keeper_of(directory)
    os.kill(pid, signal.SIGTERM)
    engine.save(6, state_of(6, size=200_000))
    engine._close(0, leave=False)
    assert wait_for(lambda: not keepers(directory.parent))
    assert complete(directory)[-1] == 6


def test_a_store_that_hangs_holds_up_no_save_and_status_says_since_when(directory: Path) -> None:
    """A real file system that takes no write any more, as one whose server is gone (fsfreeze)."""
    directory.mkdir()
    image = directory.parent / "image"
    commands = [["truncate", "-s", "64M", image], ["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, directory]]
    if os.geteuid() or not all(shutil.which(str(command[0])) for command in [*commands, ["fsfreeze"]]):
        pytest.skip("mounting and freezing a file system needs root and e2fsprogs")
    if any(subprocess.run(command, capture_output=True).returncode for command in commands):
        pytest.skip("no loop devices here")
    try:
        with CheckpointEngine(directory / "c") as engine:
            engine.save(1, state_of(1)).wait(timeout=60)
            subprocess.run(["fsfreeze", "-f", directory], check=True)
            try:
                begun = time.monotonic()
                handles = [engine.save(step, state_of(step)) for step in range(2, 12)]
                assert time.monotonic() - begun < SOON_S
                assert handles[-1].done("memory")
                assert wait_for(lambda: re.match(r"writing step \d+ has taken \d", told_problem(directory / "c")))
            finally:
                subprocess.run(["fsfreeze", "-u", directory], check=True)
            handles[-1].wait(timeout=60)
        assert loaded(directory / "c") == 11
        assert wait_for(lambda: not keepers(directory.parent))
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def told_problem(directory: Path) -> str:
    link = connect(directory, start=False)
    assert link is not None
    told, _ = link.ask("status")
    link.close()
    return str(told["ranks"][0]["problem"])


def test_what_some_ranks_have_in_memory_alone_keeps_nobody_from_beginning_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank's node was lost before anything was stored."""

    class Staged:
        steps: ClassVar = [(1, 2)]

    others = {tuple: ([], ""), list: []}
    monkeypatch.setattr(restore, "group_exchange", lambda _: lambda value: [value, others[type(value)]])
    assert restore.find(tmp_path, 0, 2, None, Staged()) is None  # type: ignore[arg-type]
    assert "step-000000002.epoch-000001 is in the memory of some ranks only" in caplog.text
