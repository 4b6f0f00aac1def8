"""transom ckpt show, where and verify --json, on checkpoints that the engine itself wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_server import transom

from transomd.tce.catalogue import list_checkpoints
from transomd.tce.manifest import MANIFEST

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20 of two ranks in epoch 1, and step 20 once more in epoch 2."""
    from transomd.tce import CheckpointEngine

    folder = tmp_path_factory.mktemp("look") / "demo"
    for epoch, steps in ((1, (10, 20)), (2, (20,))):
        ranks = [
            CheckpointEngine(folder, rank=r, world_size=2, epoch=epoch, replicated=("model",), memory=False)
            for r in (0, 1)
        ]
        for step in steps:
            for rank, engine in enumerate(ranks):
                state = {"model": {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}, "seed": rank, "mine": torch.ones(5)}
                engine.save(step, state)
        for engine in ranks:
            engine.close()
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "demo"))


def shown(*words: str) -> Any:
    done = transom("ckpt", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_show_tells_keys_tensors_and_who_wrote_them(folder: Path) -> None:
    told = shown("show", str(folder))
    assert (told["step"], told["epoch"], told["ranks"]) == (20, 2, 2)
    parts = {part["name"]: part for part in told["parts"]}
    assert sorted(parts) == ["rank-00000", "rank-00001", "replica-00000"]
    assert [parts["replica-00000"][key] for key in ("writer", "ranks", "keys")] == [0, [0, 1], ["model"]]
    assert [parts["rank-00001"][key] for key in ("writer", "ranks", "keys")] == [1, [1], ["seed", "mine"]]
    tensor = {"name": "model.w", "dtype": "bfloat16", "shape": [3, 4], "bytes": 24}
    assert parts["replica-00000"]["tensors"] == [{**tensor, "file": "replica-00000.safetensors", "note": ""}]


def test_show_as_text(folder: Path) -> None:
    lines = transom("ckpt", "show", str(folder), "10").stdout.splitlines()
    assert lines[0].startswith("step 10 of epoch 1: ")
    rows = [line.split() for line in lines]
    assert ["model.w", "bfloat16", "3x4", "24", "B", "replica-00000"] in rows
    replica = next(row for row in rows if row[:1] == ["replica-00000"])
    assert replica[1:5] == ["rank", "0", "every", "rank"]


@pytest.mark.parametrize(("words", "epoch"), [(["20"], 2), (["20", "--epoch", "1"], 1), (["newest"], 2), ([], 2)])
def test_which_one_is_meant(folder: Path, words: list[str], epoch: int) -> None:
    assert shown("show", str(folder), *words)["epoch"] == epoch


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "17"], 5, "no checkpoint of step 17 is there"),
        (["show", "20", "--epoch", "7"], 5, "no checkpoint of step 20 of epoch 7"),
        (["show", "soon"], 2, "'soon' is no step"),
        (["where", "-1"], 2, "-1"),
    ],
)
def test_what_is_not_there(folder: Path, words: list[str], code: int, said: str) -> None:
    done = transom("ckpt", words[0], str(folder), *words[1:])
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_where_names_every_file_with_its_rank(folder: Path) -> None:
    files = shown("where", str(folder), "10")["files"]
    assert [(file["rank"], file["name"]) for file in files] == [
        *((0, f"rank-00000.{ending}") for ending in ("json", "pt", "safetensors")),
        *((0, f"replica-00000.{ending}") for ending in ("pt", "safetensors")),
        *((1, f"rank-00001.{ending}") for ending in ("json", "pt", "safetensors")),
        (None, "manifest.json"),
    ]
    assert all(file["bytes"] > 0 and file["tier"] == "storage" for file in files)


def test_where_names_what_is_missing(folder: Path) -> None:
    whole = list_checkpoints(folder)[-1].path
    (whole / "rank-00001.pt").unlink()
    done = transom("ckpt", "where", str(folder), "10")
    assert "rank-00001.pt: is not there" in done.stdout.splitlines()[0]
    assert ["1", "storage", "missing", "rank-00001.pt"] in [line.split() for line in done.stdout.splitlines()]
    (whole / MANIFEST).unlink()
    done = transom("ckpt", "where", str(folder), "10")
    assert ["all", "storage", "missing", MANIFEST] in [line.split() for line in done.stdout.splitlines()]


def test_show_of_an_incomplete_one_says_what_to_type(folder: Path) -> None:
    (list_checkpoints(folder)[-1].path / MANIFEST).unlink()
    done = transom("ckpt", "show", str(folder), "10")
    assert done.returncode == 5
    assert "incomplete: 2 ranks have written" in done.stderr
    assert f"next: transom ckpt where {folder} 10" in done.stderr


def test_verify_names_file_tensor_and_bytes(folder: Path) -> None:
    whole = list_checkpoints(folder)[-1].path
    data = whole / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    done = transom("ckpt", "verify", str(folder), "--json")
    assert done.returncode == 6
    damages = {(one["step"], one["epoch"]): one["damages"] for one in json.loads(done.stdout)["checkpoints"]}
    expected = {"file": data.name, "tensor": "mine", "bytes": 20, "offset": len(content) - 20}
    assert damages == {(20, 2): [], (20, 1): [], (10, 1): [{**expected, "problem": "tensor mine is damaged"}]}
    text = transom("ckpt", "verify", str(folder), "--step", "10").stdout
    assert f"tensor mine is damaged (bytes {len(content) - 20} to {len(content) - 1})" in text


@pytest.mark.parametrize("name", ["show", "where", "gc"])
def test_the_help_of_each_has_examples(name: str) -> None:
    done = transom("ckpt", name, "-h")
    assert f"Examples:\n    transom ckpt {name}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
