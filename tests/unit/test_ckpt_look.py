"""transom ckpt show, where and verify --json, on checkpoints that the engine itself wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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
    told = {**expected, "problem": "tensor mine is damaged", "unread": False}
    assert damages == {(20, 2): [], (20, 1): [], (10, 1): [told]}
    text = transom("ckpt", "verify", str(folder), "--step", "10").stdout
    assert f"tensor mine is damaged (bytes {len(content) - 20} to {len(content) - 1})" in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: os.truncate(whole / "rank-00001.pt", 7), "rank-00001.pt: has 7 bytes instead of "),
        (lambda whole: (whole / "rank-00001.pt").unlink(), "rank-00001.pt: "),
        (lambda whole: (whole / MANIFEST).write_text("{"), f"{MANIFEST}: is not JSON"),
    ],
)
def test_a_checkpoint_that_lost_something_is_damaged_and_not_passed_over(
    folder: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(list_checkpoints(folder)[-1].path)
    for words in ([], ["--step", "10"]):
        done = transom("ckpt", "verify", str(folder), *words)
        assert done.returncode == 6, done.stderr
        assert "step 10 epoch 1: damaged\n" in done.stdout
        assert said in done.stdout
    done = transom("ckpt", "show", str(folder), "10")
    assert done.returncode == 6
    assert f"next: transom ckpt verify {folder} --step 10" in done.stderr


def test_what_cannot_be_read_is_not_called_damaged(folder: Path) -> None:
    file = list_checkpoints(folder)[-1].path / "rank-00001.pt"
    file.unlink()
    file.symlink_to(file)
    done = transom("ckpt", "verify", str(folder))
    assert done.returncode == 7
    assert "step 10 epoch 1: could not be read\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 of 3 checkpoints are good"
    data = list_checkpoints(folder)[0].path / "rank-00001.safetensors"
    os.truncate(data, 9)
    assert transom("ckpt", "verify", str(folder)).returncode == 6


def test_verify_says_how_many_it_did_not_look_at(folder: Path) -> None:
    (list_checkpoints(folder)[-1].path / MANIFEST).unlink()
    done = transom("ckpt", "verify", str(folder))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "2 of 2 checkpoints are good; 1 incomplete, not looked at"


def test_a_folder_that_cannot_be_read_has_no_age(folder: Path) -> None:
    path = list_checkpoints(folder)[-1].path
    shutil.rmtree(path)
    path.symlink_to(path)
    rows = [line.split() for line in transom("ckpt", "list", str(folder)).stdout.splitlines()]
    assert rows[-1][:6] == ["10", "1", "-", "0", "B", "-"]
    assert json.loads(transom("ckpt", "list", str(folder), "--json").stdout)["checkpoints"][-1]["created"] is None


def test_a_word_that_is_no_job_may_have_meant_a_folder() -> None:
    done = transom("ckpt", "list", "nosuch", socket=Path("/nonexistent/socket"))
    assert (done.returncode, "or write ./nosuch if you mean a folder" in done.stderr) == (3, True), done.stderr


def test_long_names_leave_room_for_the_rest_of_the_line(tmp_path: Path) -> None:
    from transomd.tce import CheckpointEngine

    names = [f"transformer.layers.{n}.self_attention.query_key_value.{kind}" for n in (1, 2) for kind in ("b", "w")]
    with CheckpointEngine(tmp_path, epoch=1, replicated=("model",), memory=False) as engine:
        engine.save(1, {"model": {name: torch.zeros(2) for name in names}})
    lines = transom("ckpt", "show", str(tmp_path)).stdout.splitlines()
    shown = lines.index("TENSOR") + 2
    assert max(map(len, lines[2:])) <= 80
    assert lines[shown::2] == [f"model.{name}" for name in names]
    assert {tuple(line.split()) for line in lines[shown + 1 :: 2]} == {("float32", "2", "8", "B", "replica-00000")}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a rank with 25 tensors of three types."""
    from transomd.tce import CheckpointEngine

    folder = tmp_path_factory.mktemp("large")
    model = {f"w{n:02d}": torch.zeros(n + 1, 8, dtype=torch.float32 if n % 2 else torch.bfloat16) for n in range(24)}
    with CheckpointEngine(folder, epoch=1, replicated=("model",), memory=False) as engine:
        engine.save(1, {"model": {**model, "count": torch.zeros((), dtype=torch.int64)}})
    return folder


def test_show_sums_up_and_names_the_ten_largest(large: Path) -> None:
    lines = transom("ckpt", "show", str(large)).stdout.splitlines()
    assert max(map(len, lines[2:])) <= 80
    rows = [line.split() for line in lines]
    types = rows.index(["TYPE", "TENSORS", "SIZE"])
    assert rows[types + 1 : types + 5] == [
        ["float32", "12", "4.9", "KiB"],
        ["bfloat16", "12", "2.2", "KiB"],
        ["int64", "1", "8", "B"],
        ["all", "25", "7.1", "KiB"],
    ]
    assert "the 10 largest of 25 tensors (--tensors shows all)" in lines
    names = [row[0] for row in rows[rows.index(["TENSOR", "TYPE", "SHAPE", "SIZE", "PART"]) + 1 :]]
    assert names == [f"model.w{n:02d}" for n in (23, 21, 19, 17, 15, 13, 11, 22, 20, 9)]


def test_show_with_tensors_names_them_all(large: Path) -> None:
    told = transom("ckpt", "show", str(large), "--tensors").stdout
    assert "largest" not in told
    assert all(f"model.w{n:02d}" in told for n in range(24))
    assert len(shown("show", str(large))["parts"][0]["tensors"]) == 25


def test_many_parts_of_a_kind_take_one_line() -> None:
    from transom_cli.tensorpage import part_table

    from transomd.tce.manifest import FileRecord, Part, StepManifest, TensorRecord

    tensor = TensorRecord("w", "float32", (2,), 0, 8, "")
    files = (FileRecord("x", 8, "", (tensor,)),)
    own = [Part(f"rank-{n:05d}", (n,), ("optim",), files) for n in range(64)]
    some = [Part(f"group-{n}", (n, n + 32), ("expert",), files) for n in range(32)]
    every = [Part("replica-00000", tuple(range(64)), ("model",), files)]
    manifest = StepManifest(step=1, epoch=1, world_size=64, created=1.0, ranks=(), parts=())
    lines = [" ".join(line.split()) for line in part_table(manifest, [*own, *some, *every], 80)]
    assert lines == [
        "PARTS EACH LOADED BY SIZE TENSORS KEYS",
        "64 one rank 512 B 64 optim",
        "32 2 ranks 256 B 32 expert",
        "1 every rank 8 B 1 model",
    ]


@pytest.mark.parametrize("name", ["show", "where", "gc"])
def test_the_help_of_each_has_examples(name: str) -> None:
    done = transom("ckpt", name, "-h")
    assert f"Examples:\n    transom ckpt {name}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
