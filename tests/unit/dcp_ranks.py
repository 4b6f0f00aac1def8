"""Ranks that save and load through torch.distributed.checkpoint, beside DCP's own files: ``dcp_ranks.py WHAT N DIR``.

The ranks are forked from one process that has imported torch, which takes longer than all that they do.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from transomd.tce.catalogue import list_checkpoints
from transomd.tce.dcp import TransomStorageReader, TransomStorageWriter, commit, load_newest
from transomd.tce.handle import SaveHandle

# Rows: divided evenly by 4, unevenly, fewer than ranks (empty shards), none at all.
ROWS = (8, 10, 2, 1, 0)


def whole(rows: int, seed: int) -> torch.Tensor:
    """What a tensor holds, on any rank."""
    return torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed))


def tensors(fill: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A state of sharded, replicated and plain tensors, and of values that are no tensors."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {}
    for rows in ROWS:
        data = fill(whole(rows, rows))
        state[f"rows{rows}"] = distribute_tensor(data, mesh, [Shard(0)])
        state[f"columns{rows}"] = distribute_tensor(data, mesh, [Shard(1)])
    state["half"] = distribute_tensor(fill(whole(7, 1).to(torch.bfloat16)), mesh, [Shard(0)])
    state["same"] = distribute_tensor(fill(whole(3, 2)), mesh, [Replicate()])
    if world % 2 == 0:
        square = init_device_mesh("cpu", (2, world // 2))
        state["square"] = distribute_tensor(fill(whole(5, 3)), square, [Shard(0), Shard(1)])
    else:
        state["square"] = distribute_tensor(fill(whole(5, 3)), mesh, [Shard(0)])
    return {**state, "plain": fill(whole(4, 4)), "nested": {"list": [fill(torch.tensor(5.0)), "word"]}}


def model_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 whose layers no number of ranks divides."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, full: bool = False) -> dict[str, Any]:
    """The state of both, sharded or gathered."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save(place: Path) -> None:
    """Save the same state to storage, into memory alone (step 1; step 2 asynchronously) and by DCP's own writer."""
    model, optimizer = model_of(0)
    state = {**tensors(lambda t: t), **trained(model, optimizer)}
    full = trained(model, optimizer, full=True)
    writers = [
        TransomStorageWriter(place / "transom", memory=False),
        TransomStorageWriter(place / "memory", storage_every=1000),
    ]
    for writer in writers:
        dcp.save(state, storage_writer=writer, checkpoint_id="1")
    handle = writers[1].handle
    assert handle is not None
    assert (handle.done("memory"), handle.done("storage")) == (True, False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "dcp"))
    for writer in writers:
        pending = dcp.async_save(state, storage_writer=writer, checkpoint_id="2")
        # What is changed now must not be in it.
        before = change(state, torch.Tensor.zero_)
        pending.result()
        back = iter(before)
        change(state, lambda tensor, back=back: tensor.copy_(next(back)))
    if dist.get_rank() == 0:
        torch.save(full, place / "full.pt")


def change(state: dict[str, Any], how: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    """Change this rank's part of every tensor in place; returns what they held before, in their order."""
    before = []
    for value in state.values():
        if isinstance(value, dict):
            before += change(value, how)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            before.append(local.detach().clone())
            with torch.no_grad():
                how(local)
    return before


def load(place: Path) -> None:
    """Load with this number of ranks; what transom's tiers and DCP's own reader bring must be what was saved."""
    theirs = tensors(torch.zeros_like)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(place / "dcp"))
    for name, tier in (("transom", "storage"), ("memory", "memory")):
        ours = tensors(torch.zeros_like)
        reader = TransomStorageReader(place / name)
        dcp.load(ours, storage_reader=reader)
        assert reader.loaded_from in (tier, "nowhere: this rank loads nothing"), reader.loaded_from
        same(ours, theirs, name)
        same(gathered(ours), gathered(tensors(lambda t: t)), name)
        load_trained(place, name)


def load_trained(place: Path, name: str) -> None:
    """Load model and optimizer under FSDP2 of this number of ranks, from step 2, which was saved asynchronously."""
    model, optimizer = model_of(1)
    sharded = trained(model, optimizer)
    step = load_newest(sharded, place / name)
    assert step == 2, step
    set_model_state_dict(model, sharded["model"])
    set_optimizer_state_dict(model, optimizer, sharded["optimizer"])
    full = trained(model, optimizer, full=True)
    if dist.get_rank() == 0:
        same(full, torch.load(place / "full.pt"), name)


def built(seed: int, kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model on a 2x2 mesh: ``hsdp`` (two replicas of two shards) or ``tp`` (FSDP2 over tensor parallel).

    With another number of ranks, or for ``fsdp``, shards only.
    """
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
    world = dist.get_world_size()
    if world != 4 or kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = both["dp"]
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def meshed(seed: int, kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Such a model, trained for a step."""
    model, optimizer = built(seed, kind)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_meshed(place: Path) -> None:
    """Save two models on meshes, thrice each, the last times asynchronously, and what they are as a whole."""
    for kind in ("hsdp", "tp"):
        model, optimizer = meshed(0, kind)
        state = trained(model, optimizer)
        writer = TransomStorageWriter(place / kind)
        dcp.save(state, storage_writer=writer, checkpoint_id="1")
        for step in (2, 3):
            dcp.async_save(state, storage_writer=writer, checkpoint_id=str(step)).result()
        assert writer.handle is not None
        assert writer.handle.step == 3
        writer.handle.wait("storage", 60)
        dist.barrier()
        full = trained(model, optimizer, full=True)
        if dist.get_rank() == 0:
            torch.save(full, place / f"{kind}.pt")


def load_meshed(place: Path) -> None:
    """Load both with this number of ranks, from memory, onto the mesh of the other kind."""
    for kind, other in (("hsdp", "tp"), ("tp", "fsdp")):
        model, optimizer = meshed(1, other)
        sharded = trained(model, optimizer)
        assert load_newest(sharded, place / kind) == 3
        set_model_state_dict(model, sharded["model"])
        set_optimizer_state_dict(model, optimizer, sharded["optimizer"])
        full = trained(model, optimizer, full=True)
        if dist.get_rank() == 0:
            same(full, torch.load(place / f"{kind}.pt"), kind)


def held_state(fill: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """What ``save_copied`` saves, on any number of ranks."""
    return {**tensors(fill), "step": 1}


def save_copied(place: Path) -> None:
    """Save into memory alone, and wait until another node has a copy; then the node of the first rank is lost."""
    writer = TransomStorageWriter(place / "held", epoch=1, storage_every=1000)
    dcp.save(held_state(lambda t: t), storage_writer=writer, checkpoint_id="1")
    assert writer.handle is not None
    writer.handle.wait("replica", 120)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(int(os.environ["DOOMED"]), signal.SIGKILL)
    dist.barrier()


def load_copied(place: Path) -> None:
    """Load that as the next start, and end at once."""
    state = held_state(torch.zeros_like)
    assert load_newest(state, place / "held", epoch=2) == 1
    same(gathered(state), gathered(held_state(lambda t: t)), "held")


def load_and_go_on(place: Path) -> None:
    """Load it and save on, the same step first; it comes to storage while only every thousandth step is to."""
    load_copied(place)
    writer = TransomStorageWriter(place / "held", epoch=2, storage_every=1000)
    for step in (1, 2):
        dcp.save(held_state(lambda t: t), storage_writer=writer, checkpoint_id=str(step))
    assert writer.handle is not None
    assert (writer.handle.step, writer.handle.done("memory")) == (2, True)
    wait = SaveHandle(
        1, lambda: any((c.step, c.epoch, c.complete) == (1, 2, True) for c in list_checkpoints(writer.directory))
    )
    wait.wait("storage", 120)
    assert not writer.handle.done("storage")
    dist.barrier()


def load_across(place: Path) -> None:
    """Load from the memory of several nodes what DCP's own reader brings from its files."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transom.tce").addHandler(handler)
    logging.getLogger("transom.tce").setLevel(logging.INFO)
    theirs, ours = tensors(torch.zeros_like), tensors(torch.zeros_like)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(place / "dcp"))
    assert load_newest(ours, place / "memory") == 2
    same(ours, theirs, "across")
    load_trained(place, "memory")
    told = {line.partition("loaded from ")[2] for line in said if "loaded from" in line}
    assert told <= {"memory", "nowhere: this rank loads nothing"}, said


def load_damaged(place: Path) -> None:
    """Step 2 is damaged: it is named on all ranks and nothing of it reaches the state; then step 1 is loaded."""
    state = tensors(torch.zeros_like)
    reader = TransomStorageReader(place / "transom", step=2)
    refused(lambda: dcp.load(state, storage_reader=reader), "rank-00001.safetensors: tensor rows10@3,0 is damaged")
    same(gathered(state), gathered(tensors(torch.zeros_like)), "untouched")
    assert load_newest(state, place / "transom") == 1
    same(gathered(state), gathered(tensors(lambda t: t)), "state")


def fail(place: Path) -> None:
    """One rank cannot write: all ranks are told, no checkpoint is there, and the next save is good."""
    writer = TransomStorageWriter(place / "transom", epoch=1, memory=False)
    state = tensors(lambda t: t)
    if dist.get_rank() == 1:
        (place / "transom" / "step-000000003.epoch-000001" / "rank-00001.safetensors").mkdir(parents=True)
    dist.barrier()
    refused(
        lambda: dcp.save(state, storage_writer=writer, checkpoint_id="3"),
        "step 3: rank 1 could not write its checkpoint",
    )
    dcp.save(state, storage_writer=writer, checkpoint_id="4")


def refused(action: Callable[[], object], said: str) -> None:
    """Raise unless the action fails on this rank too, with these words."""
    try:
        action()
    except dcp.api.CheckpointException as error:
        if said in str(error):
            return
        raise
    raise AssertionError(f"nothing said: {said}")


def gathered(state: Any) -> Any:
    """The state with whole tensors."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def same(one: Any, other: Any, path: str) -> None:
    """Raise unless both are equal to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, item in enumerate(one):
            same(item, other[index], f"{path}.{index}")
    elif isinstance(one, torch.Tensor):
        if isinstance(one, DTensor):
            one, other = one.to_local(), other.to_local()
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def run(programs: Mapping[str, Callable[[Path], None]], what: str, rank: int, world: int, place: Path) -> int:
    """Be one rank; returns the exit code."""
    warnings.filterwarnings("ignore")
    # A rank whose peers are gone may wait for ever: tell where, and end.
    faulthandler.dump_traceback_later(220, exit=True)
    torch.set_num_threads(1)
    nodes = os.environ.get("NODES", "").split() or [""]
    at = [each * len(nodes) // world for each in range(world)]
    os.environ["LOCAL_RANK"] = str(rank - at.index(at[rank]))
    if nodes[0]:
        os.environ["TRANSOM_AGENT"] = nodes[at[rank]]
    commit.TOKEN = uuid.uuid4().hex  # as in a process that was not forked
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/{what}-{world}", rank=rank, world_size=world)
        programs[what](place)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(programs: Mapping[str, Callable[[Path], None]]) -> int:
    """Fork the ranks and wait for them."""
    what, world, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code = run(programs, what, rank, world, place)
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(globals()))
