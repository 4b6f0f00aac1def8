"""Manifests, names, claims and the rules of retention: all without torch."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transomd.tce import epochs, retention
from transomd.tce.catalogue import Checkpoint, list_checkpoints, newest_epoch, verify
from transomd.tce.errors import CheckpointError, human_bytes, storage_error
from transomd.tce.files import link_file, read_chunks, write_file
from transomd.tce.manifest import (
    MANIFEST,
    RankManifest,
    StepManifest,
    decode_rank_manifest,
    encode,
    parse_step_folder,
    read_step_manifest,
    step_folder,
)


def test_folder_names_bear_step_and_epoch() -> None:
    assert step_folder(120, 3) == "step-000000120.epoch-000003"
    assert parse_step_folder("step-000000120.epoch-000003") == (120, 3)
    assert parse_step_folder(step_folder(10**10, 10**7)) == (10**10, 10**7)
    assert parse_step_folder("step-1") is None


def test_a_changed_manifest_is_seen(tmp_path: Path) -> None:
    content = encode(RankManifest(1, 2, 3, 4, 5.5, ()))
    assert decode_rank_manifest(content, "m") == RankManifest(1, 2, 3, 4, 5.5, ())
    for position in range(len(content) - 1):
        flipped = bytearray(content)
        flipped[position] ^= 1
        with pytest.raises(ValueError, match="m: "):
            decode_rank_manifest(bytes(flipped), "m")


def test_a_manifest_of_a_later_format_is_named(tmp_path: Path) -> None:
    document = json.loads(encode(RankManifest(1, 2, 3, 4, 5.5, ())))
    document["format"] = 2
    del document["xxh3_128"]
    from transomd.tce import manifest

    document["xxh3_128"] = manifest._self_digest(document)
    with pytest.raises(ValueError, match="has format 2, this transom reads format 1"):
        decode_rank_manifest(json.dumps(document).encode(), "m")


def test_a_manifest_in_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / step_folder(7, 1)
    folder.mkdir()
    (folder / MANIFEST).write_bytes(encode(StepManifest(8, 1, 0, 0.0, (), ())))
    with pytest.raises(ValueError, match="unlike its folder"):
        read_step_manifest(folder)
    assert "unlike its folder" in verify(folder)[0]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield b"some"
        raise OSError(errno.EIO, "bad disk")

    with pytest.raises(OSError, match="bad disk"):
        write_file(tmp_path / "f", 10, chunks())
    with pytest.raises(OSError, match="4 bytes were written where 10"):
        write_file(tmp_path / "f", 10, [b"some"])
    assert list(tmp_path.iterdir()) == []


def test_only_one_link_wins(tmp_path: Path) -> None:
    assert link_file(tmp_path / "m", b"first")
    assert not link_file(tmp_path / "m", b"second")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m", b"first")]


def test_pieces_do_not_cross_the_sizes_given(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcdefgh")
    assert [bytes(piece) for piece in read_chunks(tmp_path / "f", [3, 0, 4, 9])] == [b"abc", b"defg", b"h"]


def test_epochs_only_grow(tmp_path: Path) -> None:
    assert newest_epoch(tmp_path / "absent") is None
    epochs.claim_epoch(tmp_path, 3)
    epochs.claim_epoch(tmp_path, 3)
    epochs.claim_epoch(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000005.claim"]
    with pytest.raises(CheckpointError, match="epoch 4 is fenced: epoch 5 has started"):
        epochs.claim_epoch(tmp_path, 4)
    (tmp_path / step_folder(1, 9)).mkdir()
    with pytest.raises(CheckpointError, match="epoch 9"):
        epochs.check_epoch(tmp_path, 5)
    assert newest_epoch(tmp_path) == 9


def test_an_epoch_of_our_own_belongs_to_one_program(tmp_path: Path) -> None:
    epochs.claim_epoch(tmp_path, 1, "mine")
    epochs.claim_epoch(tmp_path, 1, "mine")
    with pytest.raises(CheckpointError, match="two programs write into one directory"):
        epochs.claim_epoch(tmp_path, 1, "yours")
    (tmp_path / "epoch-000001.claim").write_text("[]")
    with pytest.raises(CheckpointError, match="no readable claim"):
        epochs.claim_epoch(tmp_path, 1, "mine")


def at(step: int, epoch: int = 1, complete: bool = True) -> Checkpoint:
    return Checkpoint(step, epoch, complete, 10, 1, Path(f"/none/{epoch}/{step}"), 0.0)


def going(checkpoints: list[Checkpoint], keep: int, *protected: Checkpoint, epoch: int = 1) -> list[int]:
    return [int(path.name) for path in retention.surplus(checkpoints, keep, [c.path for c in protected], epoch)]


def test_retention_is_numeric_and_spares_what_matters() -> None:
    steps = [at(9), at(100), at(20), at(1000)]
    assert going(steps, 2) == [9, 20]
    assert going(steps, 2, at(9)) == [20]
    assert going([at(10), at(20), at(30, complete=False)], 2) == []
    assert going([at(10), at(20, complete=False), at(30, complete=False)], 1) == []


def test_an_abandoned_epoch_goes_before_the_one_in_force() -> None:
    assert going([at(100, 1), at(300, 1), at(150, 2)], 1, epoch=2) == [100, 300]


def test_a_late_writer_removes_nothing_of_a_newer_epoch() -> None:
    assert going([at(10, 1), at(20, 1), at(30, 2), at(40, 2)], 1, epoch=1) == [10, 20]


def test_leftovers_are_what_can_never_be_complete() -> None:
    listed = [at(10, 1, False), at(20, 1), at(30, 1, False), at(5, 2, False)]
    assert [path.name for path in retention.leftovers(listed, [], 1)] == ["10"]
    assert [path.name for path in retention.leftovers([*listed, at(6, 2)], [], 2)] == ["10", "30", "5"]


def test_an_empty_or_absent_directory_holds_nothing(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "absent") == []
    assert "not there" in verify(tmp_path / "absent")[0]


def test_a_full_disk_is_told_with_needed_and_free(tmp_path: Path) -> None:
    told = storage_error("step 3", OSError(errno.ENOSPC, "No space left on device"), tmp_path / "a" / "b", 12345)
    assert "step 3: No space left on device: needs 12345 bytes, " in str(told)
    assert str(told).endswith("bytes free")
    denied = storage_error("step 3", PermissionError(errno.EACCES, "Permission denied", "/x/f"), tmp_path, 1)
    assert str(denied) == "step 3: /x/f: Permission denied"
    assert "owner" in denied.hint


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5 << 60)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5120.0 PiB",
    ]


def test_importing_brings_neither_torch_nor_a_daemon() -> None:
    code = (
        "import sys, transomd.tce, transomd.tce.catalogue\n"
        "heavy = ('torch', 'numpy', 'asyncssh', 'sqlalchemy', 'pydantic', 'aiohttp', 'click')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
