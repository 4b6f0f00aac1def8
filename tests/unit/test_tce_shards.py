"""DTensors through the engine, on real ranks over gloo: FSDP2, HSDP, tensor parallel, and what does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_server import transom
from tce_keepers import own_place, wait_for
from tce_nodes import Node, nodes, pair

from transomd.tce.catalogue import list_checkpoints, load_parts, verify
from transomd.tce.manifest import Part, read_step_manifest
from transomd.tce.memory.link import call, hello

torch = pytest.importorskip("torch")

from transomd.tce.portable import export, gather  # noqa: E402

PROGRAM = Path(__file__).with_name("tce_shard_ranks.py")
KINDS = ("fsdp", "hsdp", "tp")


def ranks(what: str, count: int, place: Path, there: Sequence[Node] = ()) -> None:
    """Run so many ranks, dealt out to the nodes in their order."""
    words = [sys.executable, str(PROGRAM), what, str(count), str(place)]
    environ = {**os.environ, "NODES": " ".join(str(node.socket) for node in there)}
    environ["DOOMED"] = str(there[0].process.pid) if there else ""
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def place() -> Iterator[Path]:
    with own_place() as folder:
        folder.mkdir()
        yield folder


@pytest.fixture(scope="module")
def resumed() -> Iterator[Path]:
    """What four ranks saved amid trainings of all kinds, and resumed from to the bit."""
    with own_place() as folder:
        folder.mkdir()
        ranks("resume", 4, folder)
        yield folder


def parts_of(directory: Path) -> list[Part]:
    """The parts of the one checkpoint that is there, which is whole."""
    (item,) = list_checkpoints(directory)
    assert (item.complete, verify(item.path)) == (True, [])
    return load_parts(item.path, manifest := read_step_manifest(item.path), [part.name for part in manifest.parts])


def tensors_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [True, False])
def test_a_training_goes_on_to_the_bit_and_every_byte_of_it_is_stored_once(
    resumed: Path, kind: str, memory: bool
) -> None:
    full = torch.load(resumed / f"{kind}.pt")
    wanted = sum(tensor.nbytes for tensor in tensors_in(full) if tensor.shape)
    parts = parts_of(resumed / f"{kind}-{memory}")
    records = [record for part in parts for file in part.files for record in file.tensors]
    # Numbers of steps are plain tensors, which are each rank's own unless it is told that they are replicated.
    assert sum(record.bytes for record in records if record.shape) == wanted
    assert sum(not record.shape for record in records) == 4 * (1 if memory else 4)
    shared = {part.ranks for part in parts if len(part.ranks) == 2}
    assert shared == {"fsdp": set(), "hsdp": {(0, 2), (1, 3)}, "tp": {(0, 1), (2, 3)}}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_show_tells_the_shape_of_the_whole_of_a_share(resumed: Path, kind: str) -> None:
    full = torch.load(resumed / f"{kind}.pt")
    words = ("ckpt", "show", str(resumed / f"{kind}-False"), "--tensors")
    tensors = [t for part in json.loads(transom(*words, "--json").stdout)["parts"] for t in part["tensors"]]
    wholes = {tuple(t["whole"]) for t in tensors if "whole" in t}
    assert wholes <= {tuple(t.shape) for t in tensors_in(full)}
    assert {tuple(t.shape) for t in tensors_in(full["model"]) if t.ndim > 1} <= wholes
    assert any(" of " in line for line in transom(*words).stdout.splitlines()[3:])


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_whole_tensors(resumed: Path, kind: str, tmp_path: Path) -> None:
    """Also of shards that are dealt out from right to left, as FSDP2 over tensor parallel has them."""
    full = torch.load(resumed / f"{kind}.pt")
    found = [gather(list_checkpoints(resumed / f"{kind}-{memory}")[0].path) for memory in (True, False)]
    assert [each.of_one_rank for each in found] == [(), ("optimizer", "step")]
    for each in found:
        assert each.state["model"].keys() == full["model"].keys()
        assert all(torch.equal(each.state["model"][name], full["model"][name]) for name in full["model"])
        moments = each.state["optimizer"]["state"]
        named = enumerate(full["model"])
        assert all(
            torch.equal(moments[number][moment], full["optimizer"]["state"][name][moment])
            for number, name in named
            for moment in ("exp_avg", "exp_avg_sq", "step")
        )
    assert export(found[0].state, tmp_path / "all.pt", "torch") == []


def test_all_kinds_of_shards_come_back_in_place_from_either_tier(place: Path) -> None:
    """While somebody calls the keeper, it keeps what it has: each part once on this node."""
    links = [call(place / "kept", rank, 4, start=True) for rank in range(4)]
    ranks("keep", 4, place)
    assert links[0] is not None
    found = hello(links[0], place / "kept", 0, 4)["held"]
    held = Counter(name for _, _, _, _, _, names in found for name in names)
    parts = {part.name: part for part in parts_of(place / "kept")}
    assert held == Counter(parts.keys())
    shared = {part.ranks: set(part.keys) for part in parts.values() if len(part.ranks) > 1}
    everyones = {"plain", "nested", "same", "whole", "list"}
    assert shared == {(0, 1, 2, 3): everyones, (0, 2): {"model"}, (1, 3): {"model"}}
    for link in links:
        assert link is not None
        link.close()


def test_fewer_ranks_load_what_was_the_same_on_all_and_no_shards_but_through_an_export(resumed: Path) -> None:
    export(gather(list_checkpoints(resumed / "tp-True")[0].path).state, resumed / "exported", "dcp")
    ranks("fewer", 2, resumed)


def test_what_is_no_part_of_a_tensor_is_refused_and_what_is_on_its_way_is_waited_for(place: Path) -> None:
    ranks("odd", 2, place)


def test_another_mesh_is_refused_with_both_told_and_what_no_mesh_tells_is_declared(place: Path) -> None:
    """Data parallel ranks of tensor parallel shards: each part of them once, and whole when exported."""
    ranks("otherwise", 4, place)
    shared = {part.ranks: part.keys for part in parts_of(place / "declared")}
    assert shared == {(0, 1, 2, 3): ("step",), (0, 2): ("model",), (1, 3): ("model",)}
    found = gather(list_checkpoints(place / "declared")[0].path, rank=3).state
    assert torch.equal(found["model"]["w"], torch.arange(24.0).view(8, 3))


def test_a_lost_node_costs_neither_what_others_hold_alike_nor_shards_that_have_a_copy(place: Path) -> None:
    with nodes(place.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2", "n2": "n1"})
        ranks("save_copied", 4, place, [n1, n2])
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        ranks("load_copied", 4, place, [n3, n2])
        # What memory alone had is stored by the start that loaded it, by the first rank of each group.
        assert wait_for(lambda: any(item.complete and item.epoch == 2 for item in list_checkpoints(place / "c")))
    assert sorted(part.ranks for part in parts_of_epoch(place / "c", 2)) == [(0,), (0, 2), (1,), (1, 3), (2,), (3,)]


def parts_of_epoch(directory: Path, epoch: int) -> list[Part]:
    (item,) = [item for item in list_checkpoints(directory) if item.epoch == epoch]
    assert verify(item.path) == []
    return load_parts(item.path, manifest := read_step_manifest(item.path), [part.name for part in manifest.parts])
