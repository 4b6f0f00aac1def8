"""transom ckpt gc: what goes, what stays, and that the last good checkpoint is never removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_server import a_job, a_view, serving, transom

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.manifest import MANIFEST

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete steps 8, 9, 10 and 11 of epoch 1."""
    from transomd.tce import CheckpointEngine

    folder = tmp_path_factory.mktemp("gc") / "demo"
    engine = CheckpointEngine(folder, epoch=1, keep=9, memory=False)
    for step in (8, 9, 10, 11):
        engine.save(step, {"weight": torch.arange(64.0) + step}).wait()
    engine.close()
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "demo"))


def steps(folder: Path) -> list[int]:
    return [item.step for item in list_checkpoints(folder)]


def unfinish(folder: Path, step: int, epoch: int) -> None:
    """Leave a folder of this step and epoch without its manifest."""
    target = folder / f"step-{step:09d}.epoch-{epoch:06d}"
    shutil.copytree(list_checkpoints(folder)[0].path, target, dirs_exist_ok=True)
    (target / MANIFEST).unlink(missing_ok=True)


def damage(folder: Path, step: int) -> None:
    data = next(item.path for item in list_checkpoints(folder) if item.step == step) / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def test_a_dry_run_tells_and_removes_nothing(folder: Path) -> None:
    done = transom("ckpt", "gc", str(folder), "--keep", "2", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("would remove 2 checkpoints, ")
    assert steps(folder) == [11, 10, 9, 8]


def test_the_newest_stay_by_number_not_by_name(folder: Path) -> None:
    done = transom("ckpt", "gc", str(folder), "--keep", "2", "--json")
    assert [(one["step"], one["removed"]) for one in json.loads(done.stdout)["checkpoints"]] == [(8, True), (9, True)]
    assert steps(folder) == [11, 10]
    assert [verify(item.path) for item in list_checkpoints(folder)] == [[], []]


def test_the_newest_complete_one_cannot_be_removed(folder: Path) -> None:
    assert transom("ckpt", "gc", str(folder), "--keep", "0").returncode == 2
    assert transom("ckpt", "gc", str(folder), "--keep", "1").returncode == 0
    assert transom("ckpt", "gc", str(folder), "--keep", "1").stdout == "removed 0 checkpoints, 0 B\n"
    assert steps(folder) == [11]


def test_what_a_killed_import_left_goes_once_it_is_a_day_old(folder: Path) -> None:
    old, going_on = folder / ".import.killed.tmp", folder / ".import.writes.tmp"
    for place in (old, going_on):
        (place / "step").mkdir(parents=True)
        (place / "step" / "state.safetensors").write_text("half")
        for path in (place / "step" / "state.safetensors", place / "step", place):
            os.utime(path, (1.0, 1.0))
    (going_on / "step" / "state.safetensors").write_text("half, and more")
    told = json.loads(transom("ckpt", "gc", str(folder), "--dry-run", "--json").stdout)["imports"]
    assert told == [{"path": str(old), "removed": False}]
    assert old.exists()
    done = transom("ckpt", "gc", str(folder))
    assert "removed .import.killed.tmp: an import that was killed\n" in done.stdout
    assert (old.exists(), going_on.exists()) == (False, True)


def test_what_a_killed_import_left_goes_from_a_folder_that_holds_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / ".import.\x1b[2J.tmp"
    left.mkdir()
    os.utime(left, (1.0, 1.0))
    done = transom("ckpt", "gc", str(tmp_path))
    assert (done.returncode, left.exists(), "\x1b" in done.stdout) == (0, False, False)
    assert transom("ckpt", "gc", str(tmp_path)).returncode == 5, "no checkpoint is there yet"


def test_the_last_good_one_stays_where_the_newest_is_damaged(folder: Path) -> None:
    damage(folder, 11)
    done = transom("ckpt", "gc", str(folder), "--keep", "1")
    assert done.returncode == 6
    assert "all 1 that would stay are damaged, so none is removed" in done.stderr
    assert steps(folder) == [11, 10, 9, 8]
    assert transom("ckpt", "gc", str(folder), "--keep", "2").returncode == 0
    assert steps(folder) == [11, 10]


def test_unfinished_folders_go_once_they_cannot_be_complete_any_more(folder: Path) -> None:
    unfinish(folder, 9, 1)  # older than a complete one
    unfinish(folder, 30, 1)  # may be at work right now
    assert transom("ckpt", "gc", str(folder)).returncode == 0
    assert steps(folder) == [30, 11, 10, 8]
    (folder / "epoch-000002.claim").write_text("{}")  # now another start has taken over
    unfinish(folder, 40, 2)
    assert transom("ckpt", "gc", str(folder)).returncode == 0
    assert steps(folder) == [40, 11, 10, 8]


def test_a_damaged_manifest_stays_for_a_person_to_look_at(folder: Path) -> None:
    (list_checkpoints(folder)[-1].path / MANIFEST).write_text("{")
    assert transom("ckpt", "gc", str(folder), "--keep", "1").returncode == 0
    assert steps(folder) == [11, 8]


def test_a_folder_that_cannot_be_read_is_nothing_to_remove(folder: Path) -> None:
    path = list_checkpoints(folder)[-1].path
    shutil.rmtree(path)
    path.symlink_to(path)
    done = transom("ckpt", "gc", str(folder), "--keep", "1")
    assert done.returncode == 0, done.stderr
    assert path.is_symlink()
    assert steps(folder) == [11, 8]


def test_what_the_newest_start_may_go_on_from_stays_until_it_has_completed_one(folder: Path, tmp_path: Path) -> None:
    """A start that was sent back to step 8 would find nothing, and begin anew."""
    (folder / "epoch-000002.claim").write_text("{}")
    unfinish(folder, 9, 1)
    done = transom("ckpt", "gc", str(folder), "--keep", "1")
    assert done.returncode == 4
    assert "start 2 of the program may go on from any of them" in done.stderr
    assert steps(folder) == [11, 10, 8], "what can never be complete went"
    with serving(tmp_path) as server:
        job = a_job(checkpoint_dir=str(folder), state="running")
        server.on("GET /v1/jobs/12", lambda request: (200, a_view(job=job)))
        assert transom("ckpt", "gc", "12", "--keep", "1", "--dry-run", socket=server.socket).returncode == 4
        job["state"] = "failed"
        assert transom("ckpt", "gc", "12", "--keep", "2", socket=server.socket).returncode == 0
    assert steps(folder) == [11, 10]
    shutil.copytree(folder / "step-000000011.epoch-000001", folder / "step-000000007.epoch-000002")
    assert transom("ckpt", "gc", str(folder), "--keep", "1").returncode == 4, "incomplete"


def test_once_the_newest_start_has_completed_one_older_ones_may_go(tmp_path: Path) -> None:
    from transomd.tce import CheckpointEngine

    for epoch, step in ((1, 8), (1, 9), (2, 9)):
        engine = CheckpointEngine(tmp_path, epoch=epoch, memory=False)
        engine.save(step, {"weight": torch.arange(64.0)}).wait()
        engine.close()
    assert transom("ckpt", "gc", str(tmp_path), "--keep", "1").returncode == 0
    assert [(c.epoch, c.step) for c in list_checkpoints(tmp_path)] == [(2, 9)]
