"""DCP over the memory tier: saved into memory, stored by the keeper, loaded from memory while it is there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tce_keepers import arena_of, newest_slot, own_place, wait_for
from tce_nodes import nodes, on, pair

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.errors import CheckpointError
from transomd.tce.memory.link import call

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from transomd.tce.dcp import TransomStorageReader, TransomStorageWriter, load_newest, shares, tiers  # noqa: E402
from transomd.tce.portable import gather  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def place() -> Iterator[Path]:
    with own_place() as folder:
        yield folder
        tiers.close(folder, 10.0, leave=True)


def state_of(fill: int) -> dict[str, Any]:
    return {
        "w": torch.full((500, 3), float(fill)),
        "half": torch.full((7,), fill, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "nested": {"list": [torch.tensor(fill), "word" * fill], "step": fill},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool(torch.equal(one, other))
    return bool(one == other)


@contextmanager
def kept(place: Path) -> Iterator[None]:
    """Have the keeper keep what it has of rank 0."""
    link = call(place, 0, 1, start=True)
    assert link is not None
    yield
    link.close()


def test_what_is_in_memory_alone_is_loaded_from_there(place: Path) -> None:
    writer = TransomStorageWriter(place, storage_every=1000)
    dcp.save(state_of(7), storage_writer=writer, checkpoint_id="7")
    assert writer.handle is not None
    assert (writer.handle.step, writer.handle.done("memory"), writer.handle.done("storage")) == (7, True, False)
    assert list_checkpoints(place) == []
    state, reader = state_of(0), TransomStorageReader(place)
    dcp.load(state, storage_reader=reader)
    assert same(state, state_of(7))
    assert reader.loaded_from == "memory"


def test_the_keeper_stores_it_as_a_checkpoint_like_any_other(place: Path) -> None:
    writer = TransomStorageWriter(place)
    for step in (1, 2):
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=str(step))
        assert writer.handle is not None
        writer.handle.wait("storage", 30)
    found = list_checkpoints(place)
    assert [(item.step, item.complete, verify(item.path)) for item in found] == [(2, True, []), (1, True, [])]
    writer.close()
    assert wait_for(lambda: not shares.look(place))
    # What takes it without DCP finds the digests in the rank's manifest.
    whole = gather(found[0].path).state
    assert (whole["nested"]["step"], same(whole["w"], state_of(2)["w"])) == (2, True)
    state, reader = state_of(0), TransomStorageReader(place, step=1)
    dcp.load(state, storage_reader=reader)
    assert (same(state, state_of(1)), reader.loaded_from) == (True, "storage")


def damage_newest(place: Path) -> None:
    arena = arena_of(tiers._tiers[place, 0].memory)
    # Within the first tensor, the largest.
    arena.image(newest_slot(arena))[4096 + 100] ^= 1


def digests_are_taken(place: Path, step: int) -> bool:
    found = shares.Shares(place, 1, step, 1)
    (held,) = found._hold(0)
    taken = bool(held.digests)
    del held
    found.release()
    return taken


@pytest.mark.parametrize("stored", [True, False])
def test_a_flipped_bit_in_memory_is_seen_and_the_next_is_used(
    place: Path, stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TransomStorageWriter(place, storage_every=1 if stored else 1000)
    for step in (1, 2):
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=str(step))
        assert writer.handle is not None
        if stored:
            writer.handle.wait("storage", 30)
        assert wait_for(lambda step=step: digests_are_taken(place, step))
    damage_newest(place)
    state = state_of(0)
    assert load_newest(state, place) == (2 if stored else 1)
    assert same(state, state_of(2 if stored else 1))
    assert "step 2 of epoch 1 is damaged in memory: rank 0: tensor" in caplog.text


def test_a_later_start_loads_what_the_one_before_staged_and_fences_it(place: Path) -> None:
    first = TransomStorageWriter(place, epoch=1, storage_every=1000)
    for step in (1, 2):
        dcp.save(state_of(step), storage_writer=first, checkpoint_id=str(step))
    with kept(place):
        # As if the program had been killed: its line to the keeper ends, and nothing else.
        tiers._tiers.pop((place, 0)).memory.release()
        state = state_of(0)
        assert load_newest(state, place) == 2
        assert same(state, state_of(2))
        second = TransomStorageWriter(place, epoch=2)
        dcp.save(state_of(3), storage_writer=second, checkpoint_id="3")
        assert second.handle is not None
        second.handle.wait("storage", 30)
        assert load_newest(state, place) == 3
        assert same(state, state_of(3))


def test_where_memory_is_too_small_it_is_written_to_storage_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_MEMORY", "1M")
    big = {"w": torch.rand(1 << 20)}
    dcp.save(big, storage_writer=TransomStorageWriter(place), checkpoint_id="1")
    (found,) = list_checkpoints(place)
    assert (found.complete, verify(found.path)) == (True, [])
    assert "step 1 is written to storage at once: no memory for a copy" in caplog.text


def test_a_step_is_saved_once_and_the_policy_must_be_one(place: Path) -> None:
    writer = TransomStorageWriter(place)
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="1")
    with pytest.raises(dcp.api.CheckpointException, match="step 1 was saved in epoch 1 already"):
        dcp.save(state_of(1), storage_writer=writer, checkpoint_id="1")
    with pytest.raises(CheckpointError, match="when_full is 'never'"):
        TransomStorageWriter(place, when_full="never")  # type: ignore[arg-type]


def test_facts_that_outgrow_their_room_get_a_larger_slot(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_FACTS_BYTES", 0)
    monkeypatch.setattr(tiers, "_FACTS_BYTES_EACH", 0)
    state = {f"w{number}": torch.tensor(float(number)) for number in range(300)}
    dcp.save(state, storage_writer=TransomStorageWriter(place, storage_every=1000), checkpoint_id="1")
    found = {name: torch.zeros(()) for name in state}
    assert load_newest(found, place) == 1
    assert same(found, state)


def test_a_rank_that_never_finishes_its_save_leaves_the_slot_to_the_next(place: Path) -> None:
    """What was copied on the coordinator, while another rank failed, is dropped by the next save."""
    writer = TransomStorageWriter(place, storage_every=1000)
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "finish", lambda *_: (_ for _ in ()).throw(OSError("another rank failed")))
        for step in (2, 3, 4, 5):
            with pytest.raises(dcp.api.CheckpointException):
                dcp.save(state_of(step), storage_writer=writer, checkpoint_id=str(step))
    state = state_of(0)
    assert load_newest(state, place) == 1
    dcp.save(state_of(6), storage_writer=writer, checkpoint_id="6")
    assert load_newest(state, place) == 6
    assert same(state, state_of(6))


def test_what_reached_another_node_is_loaded_after_the_loss_of_the_first(place: Path) -> None:
    with nodes(place.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        writer = TransomStorageWriter(place, epoch=1, storage_every=1000)
        for step in (1, 2):
            dcp.save(state_of(step), storage_writer=writer, checkpoint_id=str(step))
            assert writer.handle is not None
            writer.handle.wait("replica", timeout=20)
        n1.kill()
        tiers._tiers.pop((place, 0)).memory.release()
        pair([n2, n3], {"n2": "n3"}, epoch=2)
        on(n2)
        state = state_of(0)
        assert load_newest(state, place) == 2
        assert same(state, state_of(2))
        assert [(one.step, one.world_size) for one in shares.look(place)] == [(2, 1), (1, 1)]
        # A node that has nothing: its keeper fetches it from the one that has.
        on(n3)
        assert shares.look(place) == []
        source = shares.Shares(place, 1, 2, 1)
        assert bool(source.find("rank-00000.safetensors", "w"))
        source.release()


def changing(step: int) -> dict[str, Any]:
    """A parameter, something scattered, something tied, a wide type after a narrow one, values of changing size."""
    weight = torch.full((300, 2), float(step))
    return {
        "model": {"w": torch.nn.Parameter(weight), "tied": weight, "t": torch.arange(12.0).view(3, 4).t() * step},
        "mask": torch.full((5,), step % 2 == 0),
        "double": torch.full((3,), float(step), dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "rng": torch.full((11,), step, dtype=torch.uint8),
        "text": "x" * step,
        "list": [step, {"n": torch.tensor(step)}],
    }


def test_async_save_copies_once_into_the_arena_and_nothing_leaks_in(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TransomStorageWriter(place, storage_every=1000)
    copies: list[int] = []
    plain_copy = tiers.Staging._copy
    monkeypatch.setattr(tiers.Staging, "_copy", lambda self, room: copies.append(1) or plain_copy(self, room))
    for step in range(1, 6):
        state = changing(step)
        pending = dcp.async_save(state, storage_writer=writer, checkpoint_id=str(step))
        with torch.no_grad():
            for tensor in (*state["model"].values(), state["mask"], state["double"], state["rng"]):
                tensor.zero_()
        state["list"][1]["n"].fill_(99)
        state["list"][0] = 99
        pending.result()
        found = changing(0)
        assert load_newest(found, place) == step
        assert same(found, changing(step))
    # The first save makes the arena, the second is where it learns what is written.
    assert len(copies) <= 2


def test_what_is_saved_may_change_its_form_between_asynchronous_saves(place: Path) -> None:
    writer = TransomStorageWriter(place, storage_every=1000)
    for step, state in enumerate([{}, {"more": torch.ones(7)}, {"w": torch.zeros(4000, 3)}, {"text": "y" * 9999}], 1):
        whole = {**changing(step), **state}
        dcp.async_save(whole, storage_writer=writer, checkpoint_id=str(step)).result()
        found = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in whole.items()
        }
        assert load_newest(found, place) == step
        assert same(found, whole)


def test_a_staged_state_that_is_never_saved_gives_its_slot_back(place: Path) -> None:
    writer = TransomStorageWriter(place, storage_every=1000)
    dcp.save(changing(1), storage_writer=writer, checkpoint_id="1")
    memory = tiers._tiers[place, 0].memory
    for _ in range(5):
        staged = writer.stage(changing(2))
        assert len(memory._pool.opened) == 1
        del staged
    gc.collect()
    assert memory._pool.opened == []
    found = changing(0)
    assert load_newest(found, place) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when_full", ["latest", "wait"])
def test_every_asynchronous_save_holds_its_own_state_however_close_they_follow(place: Path, when_full: Any) -> None:
    """The second async_save of DCP's own reused stager overwrites the first.

    Nor does one that waits for memory keep others from giving theirs up.
    """
    writer = TransomStorageWriter(place, keep=50, when_full=when_full)
    dcp.save({"w": torch.zeros(5000)}, storage_writer=writer, checkpoint_id="1")
    state = {"w": torch.zeros(5000)}
    pending = []
    for step in range(2, 12):
        state["w"].fill_(step)
        pending.append(dcp.async_save(state, storage_writer=writer, checkpoint_id=str(step)))
    for one in pending[:-1]:
        # Where no memory was left, a save may find that a later one is stored before it.
        with suppress(dcp.api.CheckpointException):
            one.result()
    pending[-1].result()
    writer.close()
    steps = [item.step for item in list_checkpoints(place) if item.complete]
    assert 11 in steps
    for step in steps[:-1]:
        found = {"w": torch.zeros(5000)}
        dcp.load(found, storage_reader=TransomStorageReader(place, step=step))
        assert found["w"].unique().tolist() == [step]
