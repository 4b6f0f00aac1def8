"""Of the steps that are saved, another node gets those that a number divides, the same of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import Node, nodes, on, pair
from test_tce_persister import Rank

from transomd.launch.program import LaunchPlan, program_env
from transomd.spec import JobSpec
from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.environment import from_environment
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.due import Orders, Owner, copied
from transomd.tce.memory.ledger import Ledger
from transomd.tce.memory.pool import Pool
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.memory.table import Table
from transomd.tce.replicate.agreement import aimed
from transomd.tce.replicate.sender import QUIET_S
from transomd.tce.schedule import Fixed

NEVER = 1_000_000
"""Storage gets no step."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((5000,), float(step)), "step": step}


def saver(directory: Path, every: int, rank: int = 0, world_size: int = 1) -> CheckpointEngine:
    told: dict[str, Any] = {"rank": rank, "world_size": world_size, "epoch": 1, "storage_every": NEVER}
    return CheckpointEngine(directory, replica_every=every, **told)


def test_only_the_steps_of_the_interval_are_copied_and_the_others_say_so_at_once(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = saver(directory, every=2)
        for step in range(1, 6):
            handle = engine.save(step, state_of(step))
            if step % 2 == 0:
                handle.wait("replica", timeout=60)
                continue
            assert not handle.done("replica")
            with pytest.raises(CheckpointError, match="another one gets the steps that 2 divides"):
                handle.wait("replica")
            with pytest.raises(CheckpointError, match="storage gets the steps that"):
                handle.wait("storage")
        assert n1.status()["ranks"][0]["replica_every"] == 2
        # Nor is what was saved last copied where the program pauses.
        assert wait_for(lambda: n2.copies() == [4, 2])
        assert not wait_for(lambda: n2.copies() != [4, 2], 1.5 * QUIET_S)
        n1.kill()
        pair([n2, n3], {"n2": "n3"}, epoch=2)
        on(n3)
        state: dict[str, Any] = {}
        with CheckpointEngine(directory, rank=0, world_size=1, epoch=2) as later:
            assert later.load(state) == 4
            assert "copy of another node" in later.resumed_from
            assert bool(state["x"].eq(4.0).all())
        engine.close(0)


def test_what_is_not_copied_is_loaded_and_stored_as_ever(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, replica_every=NEVER)
        engine.save(1, state_of(1)).wait("storage", timeout=60)
        engine.save(2, state_of(2))
        engine.close(60)
        state: dict[str, Any] = {}
        with CheckpointEngine(directory, rank=0, world_size=1, epoch=2) as later:
            assert later.load(state) == 2
        assert n2.copies() == []


def test_another_keeper_hears_which_steps_are_to_be_copied(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = saver(directory, every=3)
        engine.save(3, state_of(3)).wait("replica", timeout=60)
        n1.kill()
        n1.start()
        pair([n1, n2], {"n1": "n2"}, epoch=1)
        # The first save may still find the keeper lost.
        assert wait_for(lambda: engine.save(4, state_of(4)).done("memory"))
        assert n1.status()["ranks"][0]["replica_every"] == 3
        engine.save(6, state_of(6)).wait("replica", timeout=60)
        assert n2.copies() == [6, 3]
        engine.close(0)


def test_all_ranks_copy_the_same_steps_however_many_are_saved_between(directory: Path) -> None:
    with nodes(directory.parent, 2) as found:
        pair(found, {"n1": "n2", "n2": "n1"})
        engines = []
        for rank, node in enumerate(found):
            on(node)
            engines.append(saver(directory, 8, rank, 2))
        seen: set[int] = set()
        for step in range(1, 65):
            for node, engine in zip(found, engines, strict=True):
                on(node)
                assert engine.save(step, {"x": torch.full((500_000,), float(step))}).done("memory")
            seen |= {*copies(found, 0), *copies(found, 1)}
        assert wait_for(lambda: copies(found, 0)[:1] == copies(found, 1)[:1] == [64])
        seen |= {*copies(found, 0), *copies(found, 1)}
        assert seen <= set(range(8, 65, 8))
        for engine in engines:
            engine.close(0)


def copies(found: list[Node], rank: int) -> list[int]:
    """What the partner of a rank's node holds of it."""
    return found[1 - rank].copies(rank)


def test_digests_are_taken_first_of_what_is_to_be_copied(tmp_path: Path) -> None:
    """Else a step that others follow at once would never be copied, as its digests would not be known."""
    rank = Rank(tmp_path / "c")
    rank.take_over(Owner(1, 1, "", 9, every=NEVER, replica_every=3))
    for slot, step in enumerate((2, 3, 4)):
        rank.stage(slot, step, seq=step)
    rank.ring()
    assert wait_for(lambda: [entry[2].step for entry in rank.staged() if rank.digested(entry)] == [4, 3])
    assert [entry[2].step for entry in rank.for_partner()] == [3]
    rank.close()


def test_a_damaged_table_keeps_no_other_step_from_its_digests(tmp_path: Path) -> None:
    """It would be the first to be copied."""
    rank = Rank(tmp_path / "c")
    rank.take_over(Owner(1, 1, "", 9, every=NEVER, replica_every=3))
    for slot, step in enumerate((3, 4)):
        rank.stage(slot, step, seq=step)
    rank.arenas[0].image(0)[5] ^= 1
    rank.ring()
    assert wait_for(lambda: [entry[2].step for entry in rank.staged() if rank.digested(entry)] == [4])
    assert [entry[2].step for entry in rank.staged()] == [4]
    assert rank.heard("uncopied") == [3]
    rank.close()


def test_what_waits_to_be_copied_is_written_over_last() -> None:
    ledger = Ledger(1, Fixed(NEVER), Fixed(10))
    pool = Pool(1, "latest", ledger)
    arena = Arena.create(3, 4096, "rank-0")
    pool.take([os.dup(arena.descriptor)], 0)

    def save(step: int) -> list[int]:
        opened = pool.open(step)
        assert opened is not None
        seq = pool.publish(opened, step, Table(0, 1, (), ()))
        pool.drop(opened)
        ledger.add(SaveHandle(step, lambda: False), seq)
        return sorted(state.step for state in opened.arena.states() if state.state == STAGED)

    found = [save(step) for step in range(10, 15)]
    assert found[2:] == [[10, 11, 12], [10, 12, 13], [10, 13, 14]]
    ledger.hear({"t": "replicated", "step": 10, "epoch": 1})
    assert save(15) == [13, 14, 15]
    pool.close()
    arena.close()


@pytest.mark.parametrize(
    ("orders", "step", "found"),
    [
        (Orders(), 7, True),
        (Orders(owner=Owner(2, 1, "", 1)), 7, True),
        (Orders(owner=Owner(2, 1, "", 1, replica_every=3)), 7, False),
        (Orders(owner=Owner(2, 1, "", 1, replica_every=3)), 9, True),
        (Orders(owner=Owner(2, 1, "", 1, every=7, replica_every=3), resumed_step=7), 7, False),
    ],
)
def test_what_another_node_is_to_have(orders: Orders, step: int, found: bool) -> None:
    assert copied(SlotState(STAGED, step, step, 1), orders) is found


@pytest.mark.parametrize(("every", "found"), [(1, 13), (2, 14), (5, 15), (13, 13), (100, 100)])
def test_the_aim_is_a_step_of_the_interval(every: int, found: int) -> None:
    assert aimed((2, 10), 3, every) == (2, found)


def test_what_can_be_said(directory: Path) -> None:
    for wrong in ("auto", 0, 1.5):
        with pytest.raises(CheckpointError, match="replica_every is"):
            CheckpointEngine(directory, rank=0, world_size=1, replica_every=wrong)  # type: ignore[arg-type]
    told = {"TRANSOM_CHECKPOINT_DIR": "/x", "TRANSOM_CHECKPOINT_REPLICA_EVERY": "20"}
    assert from_environment(told, {})["replica_every"] == 20
    with pytest.raises(CheckpointError, match="REPLICA_EVERY is 'auto', which is not a whole number"):
        from_environment({**told, "TRANSOM_CHECKPOINT_REPLICA_EVERY": "auto"}, {})


def job(**checkpoint: Any) -> JobSpec:
    return JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint=checkpoint)


def test_a_job_s_file_hands_it_on() -> None:
    def told(spec: JobSpec) -> str:
        plan = LaunchPlan(
            job_id=1, attempt=1, epoch=1, nodes=("a", "b"), resume_step=None, master_port=1, spec=spec, env={}
        )
        return program_env(plan, {})["TRANSOM_CHECKPOINT_REPLICA_EVERY"]

    assert told(JobSpec.from_stored(job(replica_every="20").model_dump(mode="json"))) == "20"
    assert told(job()) == ""
    for wrong in ("auto", 0, True, 1.5):
        with pytest.raises(ValueError, match="number of steps of at least 1, got"):
            job(replica_every=wrong)
