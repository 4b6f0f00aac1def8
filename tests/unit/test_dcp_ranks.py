"""Real ranks over gloo: FSDP2, DTensor, other numbers of ranks, damage and failure, each told to every rank."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import transom
from tce_keepers import own_place, wait_for

from transomd.tce.catalogue import list_checkpoints, load_parts, verify
from transomd.tce.manifest import read_step_manifest
from transomd.tce.memory.link import call

pytest.importorskip("torch")

from transomd.tce.dcp.staging import VALUE

PROGRAM = Path(__file__).with_name("dcp_ranks.py")


def ranks(what: str, count: int, place: Path) -> None:
    words = [sys.executable, str(PROGRAM), what, str(count), str(place)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """What four ranks saved: to storage, by DCP's own writer, and into memory, which stays while somebody calls."""
    with own_place() as folder:
        folder.mkdir()
        links = [call(folder / "memory", rank, 4, start=True) for rank in range(4)]
        ranks("save", 4, folder)
        yield folder
        for link in links:
            assert link is not None
            link.close()


def test_what_four_ranks_saved_is_whole(saved: Path) -> None:
    found = list_checkpoints(saved / "transom")
    assert [(item.step, item.epoch, item.complete, item.ranks) for item in found] == [(2, 1, True, 4), (1, 1, True, 4)]
    assert [verify(item.path) for item in found] == [[], []]


def test_show_tells_the_shape_of_the_whole_of_a_share(saved: Path) -> None:
    words = ("ckpt", "show", str(saved / "transom"), "--tensors", "--json")
    tensors = [t for part in json.loads(transom(*words).stdout)["parts"] for t in part["tensors"]]
    wholes = {tuple(t["whole"]) for t in tensors if "whole" in t}
    assert {(8, 3), (10, 3), (5, 3), (7, 3)} <= wholes
    assert (4, 3) not in wholes, "it is one rank's alone, and whole"
    assert "2x3 of 8x3" in transom(*words[:-1]).stdout


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_another_number_of_ranks_loads_it_from_either_tier_as_dcps_own_reader_does(saved: Path, count: int) -> None:
    ranks("load", count, saved)


def test_what_was_in_memory_alone_is_stored_when_its_program_is_gone(saved: Path) -> None:
    assert wait_for(lambda: any(item.complete for item in list_checkpoints(saved / "memory")))
    found = [item for item in list_checkpoints(saved / "memory") if item.complete]
    assert [(item.ranks, verify(item.path)) for item in found] == [(4, [])] * len(found)


@pytest.fixture(scope="module")
def meshed() -> Iterator[Path]:
    """What four ranks on 2x2 meshes saved: replicas of shards, and tensor parallel under FSDP2."""
    with own_place() as folder:
        folder.mkdir()
        links = [call(folder / kind, rank, 4, start=True) for rank in range(4) for kind in ("hsdp", "tp")]
        ranks("save_meshed", 4, folder)
        yield folder
        for link in links:
            assert link is not None
            link.close()


@pytest.mark.parametrize("kind", ["hsdp", "tp"])
def test_every_byte_is_in_memory_and_in_storage_once(meshed: Path, kind: str) -> None:
    """However many ranks hold it: two replicas, or a bias that tensor parallel keeps whole on each."""
    import torch

    full = torch.load(meshed / f"{kind}.pt")
    wanted = sum(tensor.nbytes for tensor in tensors_in(full))
    for item in list_checkpoints(meshed / kind):
        assert (item.complete, verify(item.path)) == (True, [])
        parts = load_parts(item.path, manifest := read_step_manifest(item.path), [p.name for p in manifest.parts])
        records = [record for part in parts for file in part.files for record in file.tensors if record.note != VALUE]
        assert sum(record.bytes for record in records) == wanted
        assert len({part.name for part in parts}) == 5, "four ranks have shares, and the facts"


def tensors_in(value: Any) -> list[Any]:
    import torch

    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("count", [2, 4])
def test_what_lay_on_one_mesh_is_loaded_onto_another(meshed: Path, count: int) -> None:
    ranks("load_meshed", count, meshed)


def test_the_shards_of_four_ranks_are_read_whole_without_ranks(saved: Path) -> None:
    """What transom's export takes from its own checkpoint is what its import takes from DCP's directory."""
    import torch

    from transomd.tce.portable import gather
    from transomd.tce.portable.bring import read

    ours, theirs = gather(list_checkpoints(saved / "transom")[0].path).state, read(saved / "dcp")
    assert ours.keys() == theirs.keys()
    assert ours["nested"]["list"][1] == theirs["nested"]["list"][1] == "word"
    for state in ("model", "optimizer"):
        assert ours[state].keys() == theirs[state].keys()
    tensors = [name for name, value in ours.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 14
    assert all(torch.equal(ours[name], theirs[name]) for name in tensors)
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])


def test_damage_is_named_on_every_rank_and_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "transom", tmp_path / "transom")
    data = list_checkpoints(tmp_path / "transom")[0].path / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    manifest = json.loads((data.parent / "rank-00001.json").read_text())
    (tensor,) = [t for t in manifest["parts"][0]["files"][0]["tensors"] if t["name"] == "rows10@3,0"]
    content[tensor["offset"]] ^= 1
    data.write_bytes(content)
    ranks("load_damaged", 2, tmp_path)


def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    ranks("fail", 2, tmp_path)
    (found,) = [item for item in list_checkpoints(tmp_path / "transom") if item.complete]
    assert (found.step, verify(found.path)) == (4, [])


def test_whenever_it_is_killed_the_last_save_that_returned_is_there(tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAM.with_name("dcp_killed.py")), str(tmp_path), "25", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
