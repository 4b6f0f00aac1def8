"""Ranks whose states are DTensors, as they save and load through the engine: ``tce_shard_ranks.py WHAT N DIR``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from dcp_ranks import built, change, main, meshed, same, tensors, trained
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from transomd.tce import CheckpointEngine, CheckpointError

KINDS = ("fsdp", "hsdp", "tp")
NEVER = 1_000_000


def engine_in(place: Path, epoch: int, **settings: Any) -> CheckpointEngine:
    return CheckpointEngine(place, epoch=epoch, **settings)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.arange(12.0).view(2, 6) / step).square().mean().backward()
        optimizer.step()


def same_training(one: tuple[Any, Any], other: tuple[Any, Any], path: str) -> None:
    for mine, its in zip(one, other, strict=True):
        same(mine.state_dict(), its.state_dict(), path)


def resume(place: Path) -> None:
    """Save amid a training and go on; another one, which has not begun, loads that and goes on: to the same bits.

    From memory and from storage; with everything replicated but for its shards, and without.
    """
    for kind in KINDS:
        for memory in (True, False):
            told: dict[str, Any] = {"memory": memory, "replicated": memory}
            first, at = built(0, kind), place / f"{kind}-{memory}"
            train(*first, 1, 2)
            engine = engine_in(at, 1, **told)
            handle = engine.save(2, {"model": first[0], "optimizer": first[1], "step": 2})
            full = trained(*first, full=True)
            if dist.get_rank() == 0:
                torch.save(full, place / f"{kind}.pt")
            train(*first, 3, 4)  # what is changed now must not be in it
            handle.wait("storage", 60)
            dist.barrier()
            second = built(1, kind)
            state: dict[str, Any] = {"model": second[0], "optimizer": second[1], "step": 0}
            again = engine_in(at, 2, **told)
            assert again.load(state) == state["step"] == 2
            assert again.resumed_from == ("memory" if memory else "storage"), again.resumed_from
            train(*second, 3, 4)
            same_training(first, second, kind)
            again.close()
            engine.close()


def keep(place: Path) -> None:
    """Save what is in every way a DTensor, and plain values beside, into memory; it stays when the ranks are gone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(5.0), mesh, [Replicate()])
    state = {**tensors(lambda t: t), "whole": whole, "list": [whole, {"tied": whole}], "own": dist.get_rank()}
    state["model"] = held()["model"]
    engine = engine_in(place / "kept", 1, replicated=("plain", "nested"))
    engine.save(1, state).wait("storage", 60)
    for again in (engine, engine_in(place / "kept", 1, memory=False)):
        back = {**tensors(torch.zeros_like), "whole": torch.zeros_like(whole), "list": [], "own": -1}
        back["model"] = held()["model"]
        change(back["model"], torch.Tensor.zero_)
        kept = back["rows8"].to_local()
        assert again.load(back) == 1
        assert back["list"][0].placements == (Replicate(),)
        same(back, state, again.resumed_from)
        same(back["list"], state["list"], again.resumed_from)
        assert back["rows8"].to_local().data_ptr() == kept.data_ptr(), "in place"
        bare: dict[str, Any] = {}
        assert again.load(bare) == 1
        same(bare["square"], state["square"].to_local(), "an empty state gets this rank's share")
    dist.barrier()


def otherwise(place: Path) -> None:
    """What was saved on one mesh is refused on another, and nothing of the state is changed."""
    model, optimizer = meshed(0, "fsdp")
    engine = engine_in(place / "c", 1, memory=False)
    engine.save(1, {"model": model, "optimizer": optimizer, "w": distribute("fsdp", torch.ones(8, 4))}).wait(timeout=60)
    dist.barrier()
    other, second = meshed(1, "hsdp")
    before = change(trained(other, second), lambda tensor: tensor)
    said = refused(lambda: engine.load({"model": other, "optimizer": second}))
    assert "['0.weight']: saved as Shard(0) on a mesh of 4, from " in said, said
    assert "; in the program Replicate(), Shard(0) on a mesh of replica=2, shard=2, from " in said, said
    same(change(trained(other, second), lambda tensor: tensor), before, "unchanged")
    refused(lambda: engine.load({"w": distribute("columns", torch.ones(8, 4))}), "Shard(0) on a mesh of 4", "Shard(1)")
    refused(lambda: engine.load({"w": distribute("fsdp", torch.ones(6, 4))}), "of [8, 4]", "of [6, 4]")
    refused(lambda: engine.load({"w": torch.ones(8, 4)}), "saved as a DTensor", "a plain tensor")
    turned = DTensor.from_local(torch.ones(2, 4), DeviceMesh("cpu", [1, 0, 3, 2]), [Shard(0)], run_check=False)
    begins = [f"from [{2 * rank}, 0]" for rank in (dist.get_rank(), dist.get_rank() ^ 1)]
    refused(lambda: engine.load({"w": turned}), *begins)
    # An optimizer that has not begun knows its mesh from its parameters; this one has another, and one has none.
    bare = torch.nn.Linear(2, 2)
    for known in (built(1, "hsdp")[1], torch.optim.AdamW(bare.parameters())):
        refused(lambda known=known: engine.load({"optimizer": known}), "no meshes that it may be of")
    fresh = built(1, "fsdp")[1]
    assert engine.load({"optimizer": fresh}) == 1
    same(fresh.state_dict()["state"], optimizer.state_dict()["state"], "fresh")
    other_ranks(place)
    declared(place)


def other_ranks(place: Path) -> None:
    """A mesh of the same name and size, but of other ranks, is not taken for the one that was."""
    there = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    here = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]
    first, second = (distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]) for mesh in (there, here))
    engine = engine_in(place / "others", 1, memory=False)
    engine.save(1, {"here": second, "there": {"x": first}}).wait(timeout=60)
    dist.barrier()
    state: dict[str, Any] = {"here": torch.zeros_like(second), "there": {}}
    refused(lambda: engine.load(state), "state['there']['x']: saved as Shard(0)", "no meshes that it may be of")
    state["there"]["y"] = torch.zeros_like(first)
    refused(lambda: engine.load(state), "has nothing for state['there']['y']")
    engine.save(2, {"here": second, "there": {"x": first, "y": first}}).wait(timeout=60)
    dist.barrier()
    assert engine.load(state) == 2
    same(state, {"here": second, "there": {"y": first, "x": first}}, "others")
    assert state["there"]["x"].device_mesh == there


def fewer(place: Path) -> None:
    """Two ranks do not load what four saved as shards, but what was the same on all of them."""
    model, optimizer = built(0, "fsdp")
    for memory, keys in ((True, "model, optimizer"), (False, "model, optimizer, step")):
        engine = engine_in(place / f"fsdp-{memory}", 3, memory=False)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        refused(lambda engine=engine, state=state: engine.load(state), f"4 ranks and this program has 2: {keys} differ")
    some: dict[str, Any] = {"step": 0}
    bare: dict[str, Any] = {}
    for state in (some, bare):
        assert engine_in(place / "fsdp-True", 3, memory=False).load(state) == 2
        assert state == {"step": 2}
    # What was exported for DCP goes onto any mesh.
    exported = {"model": get_model_state_dict(model)}
    dcp.load(exported, storage_reader=dcp.FileSystemReader(place / "exported"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        same(full, torch.load(place / "tp.pt")["model"], "exported")


def odd(place: Path) -> None:
    """What is no part of a tensor is refused by its path; what is still on its way is waited for."""
    mesh = init_device_mesh("cpu", (2,))
    engine = engine_in(place / "c", 1)
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    refused(lambda: engine.save(1, {"a": [partial]}), "state['a'][0] (", "each rank holds an addend of it (Partial)")
    uneven = DTensor.from_local(torch.ones(1 + dist.get_rank(), 2), mesh, [Shard(0)], shape=(3, 2), stride=(2, 1))
    refused(lambda: engine.save(1, {"a": uneven}), "where its placements make it")
    coming = funcol.all_gather_tensor(torch.full((2,), float(dist.get_rank())), 0, mesh)
    assert type(coming) is not torch.Tensor
    here = DTensor.from_local(coming, mesh, [Replicate()])
    engine.save(1, {"plain": coming, "dealt": here}).wait("storage", 60)
    back: dict[str, Any] = {"plain": torch.zeros(4), "dealt": DTensor.from_local(torch.zeros(4), mesh, [Replicate()])}
    assert engine.load(back) == 1
    assert back["plain"].tolist() == back["dealt"].to_local().tolist() == [0.0, 0.0, 1.0, 1.0]


def declared(place: Path) -> None:
    """Tensor parallel within nodes, data parallel across, of which meshes know nothing: it is declared."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"model": {"w": distribute_tensor(torch.arange(24.0).view(8, 3), square["tp"], [Shard(0)])}, "step": 1}
    engine = engine_in(place / "declared", 1, replicated={"model": square["dp"].get_group(), "step": range(4)})
    engine.save(1, state).wait("storage", 60)
    dist.barrier()  # else the next start could fence what another rank is about to complete
    again = engine_in(place / "declared", 2, memory=False)
    back: dict[str, Any] = {"model": {"w": torch.zeros_like(state["model"]["w"])}, "step": 0}
    assert again.load(back) == 1
    same(back, state, "declared")
    dist.barrier()


def save_copied(place: Path) -> None:
    """Save HSDP and shards alone into memory, until another node has a copy; then the first one is lost."""
    state = held()
    engine = engine_in(place / "c", 1, storage_every=NEVER)
    engine.save(1, state).wait("replica", 120)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(int(os.environ["DOOMED"]), signal.SIGKILL)
    dist.barrier()


def load_copied(place: Path) -> None:
    """Load that as the next start, on other nodes."""
    state, wanted = held(), held()
    change(state, torch.Tensor.zero_)
    engine = engine_in(place / "c", 2, storage_every=NEVER)
    assert engine.load(state) == 1
    same(state, wanted, "held")
    dist.barrier()


def held() -> dict[str, Any]:
    """What ``save_copied`` saves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    both = {
        name: distribute_tensor(torch.arange(4000.0).view(100, 40), mesh, placements)
        for name, placements in {"hsdp": [Replicate(), Shard(0)], "fsdp": [Shard(0), Shard(1)]}.items()
    }
    return {"model": both, "plain": torch.full((70,), float(dist.get_rank()))}


def distribute(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(1) if kind == "columns" else Shard(0)])


def refused(action: Callable[[], object], *said: str) -> str:
    """The error, which must hold these words."""
    told = CheckpointError("nothing was said")
    try:
        action()
    except CheckpointError as error:
        told = error
    assert told.hint, told
    assert all(words in str(told) for words in said), told
    return str(told)


if __name__ == "__main__":
    sys.exit(main(globals()))
