"""Which ranks hold the same, as it is declared: each byte once in storage, once in the memory of each node.

Several ranks are several engines here: no rank waits for another, so one process can play them in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import nodes, on, pair

from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.catalogue import list_checkpoints, load_parts, verify
from transomd.tce.environment import before_on_node
from transomd.tce.groups import Groups, first_of_node
from transomd.tce.manifest import read_step_manifest
from transomd.tce.memory.link import call, hello
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.memory.table import Place
from transomd.tce.persist import Writer
from transomd.tce.replicate.copies import Copies
from transomd.tce.replicate.offer import Offer
from transomd.tce.replicate.post import Post
from transomd.tce.shards import Deal

NEVER = 1_000_000
PAIRS = ((0, 2), (1, 3))
"""Ranks that hold the same of four."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def pair_of(rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in PAIRS if rank in ranks)


def state_of(step: int, rank: int) -> dict[str, Any]:
    half = torch.arange(3000) + 10 * step + rank % 2
    return {"half": {"w": half, "step": step}, "whole": torch.full((900,), float(step)), "own": torch.tensor(rank)}


def engine_of(directory: Path, rank: int, epoch: int = 1, **settings: Any) -> CheckpointEngine:
    declared = {"half": pair_of(rank), "whole": range(4)}
    return CheckpointEngine(directory, rank=rank, world_size=4, epoch=epoch, replicated=declared, **settings)


def is_right(state: dict[str, Any], step: int, rank: int) -> None:
    wanted = state_of(step, rank)
    assert state.keys() == wanted.keys()
    assert state["half"]["w"].equal(wanted["half"]["w"])
    assert state["half"]["step"] == step
    assert state["whole"].equal(wanted["whole"])
    assert state["own"].equal(wanted["own"])


# ------------------------------------------------------------------------- which group, and what it is called


@pytest.mark.parametrize(
    ("ranks", "before", "first"),
    [
        ((0, 1, 2, 3), (), True),
        ((0, 1, 2, 3), (2,), False),
        ((1, 3), (2,), True),
        ((1, 3), (0, 1, 2), False),
        ((0, 5), (2, 3, 4), True),
        ((2,), (0, 1), True),
        # Dealt out in turn to two nodes.
        ((0, 2), (0,), False),
        ((2, 3), (1,), True),
    ],
)
def test_the_first_of_a_group_on_a_node(ranks: tuple[int, ...], before: tuple[int, ...], first: bool) -> None:
    assert first_of_node(ranks, before) is first


@pytest.mark.parametrize(
    ("rank", "environ", "before"),
    [
        (3, {"LOCAL_RANK": "1"}, (2,)),
        (3, {}, ()),
        (1, {"LOCAL_RANK": "3"}, (0,)),
        # srun --distribution=cyclic over two nodes
        (3, {"LOCAL_RANK": "1", "SLURM_PROCID": "3", "SLURM_GTIDS": "1,3"}, (1,)),
        (5, {"SLURM_PROCID": "5", "SLURM_GTIDS": "1,3,5"}, (1, 3)),
        # torchrun in a task of Slurm's
        (1, {"LOCAL_RANK": "1", "SLURM_PROCID": "1", "SLURM_GTIDS": "1"}, (0,)),
        (9, {"LOCAL_RANK": "1", "SLURM_PROCID": "1", "SLURM_GTIDS": "1"}, (8,)),
    ],
)
def test_the_ranks_of_the_node_that_come_before(rank: int, environ: dict[str, str], before: tuple[int, ...]) -> None:
    assert before_on_node(rank, environ) == before


def test_ranks_that_slurm_deals_out_in_turn_hold_each_part_once_a_node(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2, which have one half, are on one node, and 1 and 3 on the other."""
    with nodes(directory.parent, 2) as found:
        engines = []
        for rank in range(4):
            on(found[rank % 2])
            for name, value in {"LOCAL_RANK": rank // 2, "SLURM_PROCID": rank}.items():
                monkeypatch.setenv(name, str(value))
            monkeypatch.setenv("SLURM_GTIDS", ("0,2", "1,3")[rank % 2])
            engines.append(engine_of(directory, rank, storage_every=NEVER))
            engines[-1].save(1, state_of(1, rank))
        halves = [Groups({"k": ranks}, ranks[0], 4).name_of("k") for ranks in PAIRS]
        for number, node in enumerate(found):
            on(node)
            own = [f"rank-{rank:05d}" for rank in (number, number + 2)]
            assert held(directory, number) == sorted([*own, halves[number], "replica-00000"])
        for engine in engines:
            engine.close(0)


def test_groups_with_the_same_first_rank_have_different_parts_and_all_their_ranks_say_which() -> None:
    seen: dict[str, set[int]] = {}
    for declared in ((0, 1), (0, 2), (0, 1, 2), range(4), [3, 1, 1], (0,)):
        for rank in set(declared):
            groups = Groups({"k": declared}, rank, 4)
            name = groups.name_of("k")
            assert groups.ranks(name) == tuple(sorted(set(declared)))
            seen.setdefault(name, set()).update(declared)
    assert {*map(frozenset, seen.values())} == {*map(frozenset, [{0, 1}, {0, 2}, {0, 1, 2}, {0, 1, 2, 3}, {1, 3}, {0}])}
    assert [name.split("-")[:2] for name in sorted(seen)] == [
        ["rank", "00000"],
        *[["replica", "00000"]] * 4,
        ["replica", "00001"],
    ]


@pytest.mark.parametrize(
    ("declared", "same", "mesh", "ranks"),
    [
        ((), (1,), {0, 1, 2, 3}, (1,)),  # a shard
        ((), (1, 3), {0, 1, 2, 3}, (1, 3)),  # which two hold
        ((), (0, 1, 2, 3), {0, 1, 2, 3}, (0, 1, 2, 3)),
        ((), (), {2, 3}, (1,)),  # of a mesh of other ranks
        (True, (1,), {0, 1, 2, 3}, (1,)),  # placements know better
        (True, (1,), {0, 1}, (1,)),
        (True, (1,), {1}, (0, 1, 2, 3)),  # of what no mesh knows, what is declared counts
        ({"k": (1, 3)}, (1,), {0, 1}, (1, 3)),  # tensor parallel within, data parallel across
        ({"k": (1, 3)}, (0, 1), {0, 1}, (0, 1)),
        ({"k": (1, 3)}, (1,), {0, 1, 2, 3}, (1,)),
    ],
)
def test_a_dtensor_belongs_to_the_ranks_of_its_placements(
    declared: Any, same: tuple[int, ...], mesh: set[int], ranks: tuple[int, ...]
) -> None:
    groups = Groups(declared, 1, 4)
    deal = Deal(same, frozenset(mesh))
    assert groups.ranks(groups.name_of("k", deal)) == ranks
    assert groups.name_of("k", deal) == groups.name_of("k", deal)


def test_a_mesh_that_knows_this_rank_by_another_number_is_refused() -> None:
    for rank, world_size, same in ((1, 4, (0,)), (1, 2, (1, 3))):
        with pytest.raises(CheckpointError, match="a DTensor's mesh knows it as one of"):
            Groups((), rank, world_size).name_of("k", Deal(same, frozenset(range(4))))


def test_every_wrong_declaration_is_told_at_once() -> None:
    told = {"a": (0, 2), "b": (1, 4), "c": "word", "d": (), "e": (1, 2)}
    with pytest.raises(CheckpointError, match=r"replicated on rank 1 of 4: a: .* b: .* c: .* d: ") as caught:
        Groups(told, 1, 4)
    assert "e: " not in str(caught.value)


# ------------------------------------------------------------------------- storage


def test_each_byte_is_stored_once_by_the_first_rank_of_its_group(tmp_path: Path) -> None:
    handles = [engine_of(tmp_path, rank, memory=False).save(1, state_of(1, rank)) for rank in range(4)]
    assert handles[0].done()
    (item,) = list_checkpoints(tmp_path)
    assert (item.complete, verify(item.path)) == (True, [])
    manifest = read_step_manifest(item.path)
    told = [(part.writer, part.ranks, part.keys) for part in manifest.parts]
    assert told == [
        (0, (0,), ("own",)),
        (0, (0, 1, 2, 3), ("whole",)),
        (0, (0, 2), ("half",)),
        (1, (1,), ("own",)),
        (1, (1, 3), ("half",)),
        (2, (2,), ("own",)),
        (3, (3,), ("own",)),
    ]
    records = [
        record
        for part in load_parts(item.path, manifest, {part.name for part in manifest.parts})
        for file in part.files
        for record in file.tensors
    ]
    assert sum(record.bytes for record in records) == 2 * 8 * 3000 + 4 * 900 + 4 * 8
    for rank in range(4):
        state: dict[str, Any] = {}
        assert engine_of(tmp_path, rank, 2, memory=False).load(state) == 1
        is_right(state, 1, rank)


def test_what_some_ranks_hold_alike_needs_as_many_ranks_and_what_all_hold_does_not(tmp_path: Path) -> None:
    for rank in range(4):
        engine_of(tmp_path, rank, memory=False).save(1, state_of(1, rank))
    engine = CheckpointEngine(tmp_path, rank=0, world_size=2, epoch=2, memory=False)
    state: dict[str, Any] = {}
    assert engine.load(state) == 1
    assert state.keys() == {"whole"}
    with pytest.raises(CheckpointError, match="saved by 4 ranks and this program has 2: half differ"):
        engine.load({"half": {}})


@pytest.mark.parametrize("memory", [True, False])
def test_there_is_no_checkpoint_of_groups_that_do_not_fit_together(directory: Path, memory: bool) -> None:
    """Rank 3 takes rank 1 for the one that writes, which knows nothing of it."""
    handles, ranks = [], []
    for rank in range(4):
        declared = {"half": pair_of(rank)} if rank != 1 else ()
        told = {"rank": rank, "world_size": 4, "epoch": 1, "memory": memory}
        ranks.append(CheckpointEngine(directory, replicated=declared, **told))
        handles.append(ranks[-1].save(1, state_of(1, rank)))
    with pytest.raises(CheckpointError, match=r"step 1: rank 3 needs replica-00001-\w{8}, which no rank has written"):
        handles[-1].wait(timeout=60)
    assert [item.complete for item in list_checkpoints(directory)] == [False]
    for engine in ranks:
        engine.close(10)


def test_there_is_no_checkpoint_where_a_rank_is_given_what_it_holds_with_others(tmp_path: Path) -> None:
    """Rank 1 takes rank 2 for one that holds the same as it does, which holds the same as rank 0."""
    handles = []
    for rank, declared in enumerate([(0, 2), (1, 2), (0, 2)]):
        told = {"rank": rank, "world_size": 3, "epoch": 1, "memory": False}
        engine = CheckpointEngine(tmp_path / "c", replicated={"half": declared}, **told)
        handles.append(engine.save(1, {"half": torch.full((3,), float(rank % 2))}))
    with pytest.raises(CheckpointError, match="rank 1 has written half for rank 2, too, which holds them otherwise"):
        handles[-1].wait(timeout=60)
    assert [item.complete for item in list_checkpoints(tmp_path / "c")] == [False]


def test_what_a_rank_takes_back_is_its_own_and_its_groups(tmp_path: Path) -> None:
    """Names of all kinds of its own, and none of another's."""
    for rank in range(4):
        engine_of(tmp_path, rank, memory=False, keep=1).save(1, state_of(1, rank))
    (item,) = list_checkpoints(tmp_path)
    Writer(tmp_path, 1, 4, 1).take_back(1)
    left = sorted(path.name for path in item.path.glob("r*-00001*"))
    assert left == []
    assert len(list(item.path.glob("r*-00000*"))) == 7
    Writer(tmp_path, 0, 4, 1).take_back(1)
    assert not list(item.path.glob("r*-00000*"))


def test_a_process_group_says_which_ranks_it_has(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        groups = Groups({"k": dist.group.WORLD}, 0, 1)
        assert groups.name_of("k") == "replica-00000"
    finally:
        dist.destroy_process_group()
    with pytest.raises(CheckpointError, match="neither ranks nor a process group"):
        Groups({"k": object()}, 0, 1)


# ------------------------------------------------------------------------- memory


def held(directory: Path, rank: int) -> list[str]:
    """The parts that this node's memory has of step 1, whoever's, each as often as it is there."""
    link = call(directory, rank, 4, start=False)
    assert link is not None
    found = hello(link, directory, rank, 4)["held"]
    link.close()
    return sorted(name for _, _, step, _, _, names in found if step == 1 for name in names)


def digested(directory: Path, rank: int) -> bool:
    """Whether this node knows the digests of all that it holds of step 1 for a rank."""
    link = call(directory, rank, 4, start=False)
    assert link is not None
    answer, descriptors = link.ask("hold", epoch=1, step=1)
    link.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return all(slot["digests"] for slot in answer["slots"])


@pytest.mark.parametrize("a_node", [2, 4])
def test_a_node_has_each_part_once_and_each_rank_loads_what_is_its_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch, a_node: int
) -> None:
    """Each half is on every node, whether that has two ranks or all four."""
    with nodes(directory.parent, 4 // a_node) as found:
        engines = []
        for rank in range(4):
            on(found[rank // a_node])
            monkeypatch.setenv("LOCAL_RANK", str(rank % a_node))
            engines.append(engine_of(directory, rank, storage_every=NEVER))
            engines[-1].save(1, state_of(1, rank))
        halves = [Groups({"k": ranks}, ranks[0], 4).name_of("k") for ranks in PAIRS]
        for number, node in enumerate(found):
            on(node)
            own = [f"rank-{rank:05d}" for rank in range(number * a_node, number * a_node + a_node)]
            assert held(directory, number * a_node) == sorted([*own, *halves, "replica-00000"])
        for rank, engine in enumerate(engines):
            on(found[rank // a_node])
            recall = engine._memory.recall() if engine._memory else None
            assert recall is not None
            assert recall.problems(1, 1) == []
            assert sorted(name for place, _ in recall.held() for name in place.keys) == ["half", "own", "whole"]
            recall.release()
            engine.close(0)


def test_parts_of_a_lost_node_come_from_the_ranks_that_hold_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 had ranks 0 and 1. Its own parts have a copy on n2; the halves were on n2 anyhow, and were not sent."""
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        engines = []
        for rank in range(4):
            on((n1, n2)[rank // 2])
            monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
            engines.append(engine_of(directory, rank, storage_every=NEVER))
        for rank in (2, 3):
            engines[rank].save(1, state_of(1, rank))
        on(n2)
        assert wait_for(lambda: digested(directory, 2) and digested(directory, 3)), n2.status()
        for handle in [engines[rank].save(1, state_of(1, rank)) for rank in (0, 1)]:
            handle.wait("replica", timeout=60)
        halves = [Groups({"k": ranks}, ranks[0], 4).name_of("k") for ranks in PAIRS]
        assert held(directory, 2) == sorted([*(f"rank-{rank:05d}" for rank in range(4)), *halves, "replica-00000"])
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        on(n3)
        for rank in (0, 1):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            second = engine_of(directory, rank, 2, storage_every=NEVER)
            recall = second._memory.recall() if second._memory else None
            assert recall is not None
            assert recall.problems(1, 1) == []
            assert {name: place.ranks for place, _ in recall.held() for name in place.keys} == {
                "own": (rank,),
                "half": pair_of(rank),
                "whole": (0, 1, 2, 3),
            }
            recall.release()
            second.close(0)
        for engine in engines:
            engine.close(0)


@pytest.mark.parametrize(
    ("here", "ranks", "answer"),
    [
        ((1, 3), (0, 2), "no"),  # nobody here holds the same: it is to be sent at once
        ((1, 3), (2, 3), "later"),
        ((1, 3), (0,), "no"),
        ((), (0, 2), "later"),  # who is here is not known yet
    ],
)
def test_a_part_is_waited_for_only_where_ranks_of_this_node_hold_the_same(
    here: tuple[int, ...], ranks: tuple[int, ...], answer: str
) -> None:
    tenants = [SimpleNamespace(directory="/d", rank=rank, staged=list) for rank in here]
    other = SimpleNamespace(directory="/other", rank=ranks[0], staged=list)
    post = Post("token", 0, lambda _: [], lambda: [*tenants, other], Copies(lambda _: ""))  # type: ignore[list-item]
    offer = Offer("/d", 0, SlotState(STAGED, 1, 1, 1), b"", {})
    assert post._here(offer, Place("part", ranks, (), (), 0, 0, 0, 0, False)) == answer
    post._listener.close()
