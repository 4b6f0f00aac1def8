"""transom ckpt: real checkpoints in real folders, whole, incomplete and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_server import Recorded, a_job, a_view, serving, transom

from transomd.tce.catalogue import list_checkpoints
from transomd.tce.manifest import MANIFEST

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints that the engine itself wrote."""
    from transomd.tce import CheckpointEngine

    folder = tmp_path_factory.mktemp("ck") / "demo"
    engine = CheckpointEngine(folder)
    for step in (10, 20, 30):
        engine.save(step, {"weight": torch.arange(64.0) + step, "step": step}).wait()
    engine.close()
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy, of which step 20 has a damaged byte and step 30 lost its manifest."""
    copy = tmp_path / "demo"
    shutil.copytree(original, copy)
    newest, middle, _ = list_checkpoints(copy)
    (newest.path / MANIFEST).unlink()
    data = max(middle.path.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.stat().st_size))
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    return copy


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        recorded.on("GET /v1/jobs/12", (200, a_view(job=a_job(checkpoint_dir=str(folder)))))
        yield recorded


def test_list(folder: Path) -> None:
    done = transom("ckpt", "list", str(folder))
    assert done.returncode == 0
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header == ["STEP", "EPOCH", "RANKS", "SIZE", "AGE", "STATE"]
    assert [row[0] for row in rows] == ["30", "20", "10"]
    assert "incomplete:" in rows[0]
    assert rows[1][-1] == rows[2][-1] == "complete"


def test_list_of_a_job(server: Recorded) -> None:
    answer = json.loads(transom("ckpt", "list", "12", "--json", socket=server.socket).stdout)
    assert [item["step"] for item in answer["checkpoints"]] == [30, 20, 10]
    assert [item["complete"] for item in answer["checkpoints"]] == [False, True, True]


def test_verify_names_the_damaged_tensor(folder: Path) -> None:
    done = transom("ckpt", "verify", str(folder))
    assert done.returncode == 6
    assert "step 20 epoch " in done.stdout
    assert "tensor weight is damaged" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 of 2 checkpoints are good; 1 incomplete, not looked at"


def test_verify_one_step(folder: Path) -> None:
    done = transom("ckpt", "verify", str(folder), "--step", "10")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 of 1 checkpoints are good")
    done = transom("ckpt", "verify", str(folder), "--step", "30")
    assert (done.returncode, "no complete checkpoint of step 30" in done.stderr) == (5, True)


@pytest.mark.parametrize("command", ["list", "verify"])
def test_no_folder_and_an_empty_one(command: str, tmp_path: Path) -> None:
    done = transom("ckpt", command, str(tmp_path / "gone"))
    assert (done.returncode, "there is no such folder" in done.stderr) == (5, True)
    done = transom("ckpt", command, str(tmp_path))
    assert (done.returncode, "no checkpoint is there yet" in done.stderr) == (5, True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    done = transom("ckpt", "list", str(tmp_path / "f"))
    assert done.returncode == 1
    assert "Not a directory" in done.stderr
