"""What is about to be loaded is read whole, whatever the manifest knows of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transomd.tce import CheckpointEngine, examine
from transomd.tce.catalogue import list_checkpoints, load_parts
from transomd.tce.files import digest
from transomd.tce.manifest import MANIFEST, FileRecord, RankEntry, decode_rank_manifest, encode, read_step_manifest

SIZES = {"small": 10, "middle": 300_000, "none": 0, "large": 900_000}


def checkpoint(directory: Path) -> tuple[Path, FileRecord]:
    """The folder of a checkpoint of one rank, and the record of its tensors' file."""
    with CheckpointEngine(directory, memory=False) as engine:
        engine.save(1, {"model": {name: torch.rand(count) for name, count in SIZES.items()}})
    folder = list_checkpoints(directory)[0].path
    [part] = load_parts(folder, read_step_manifest(folder), ["rank-00000"])
    return folder, next(file for file in part.files if file.tensors)


def problems(folder: Path) -> list[str]:
    return examine.problems(folder, read_step_manifest(folder), ["rank-00000"])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def without_head(folder: Path, file: FileRecord) -> None:
    """Make the manifests what an earlier transom wrote: no digest of the head alone."""
    step = read_step_manifest(folder)
    path = folder / step.ranks[0].name
    assert file.head_xxh3_128 in path.read_text()
    [part] = load_parts(folder, step, ["rank-00000"])
    files = tuple(replace(each, head_xxh3_128="") for each in part.files)
    content = encode(replace(decode_rank_manifest(path.read_bytes(), "m"), parts=(replace(part, files=files),)))
    path.write_bytes(content)
    entry = RankEntry(0, path.name, len(content), digest(content))
    (folder / MANIFEST).write_bytes(encode(replace(step, ranks=(entry,))))


@pytest.mark.parametrize("old", [False, True], ids=["", "written by an earlier transom"])
def test_every_byte_counts(tmp_path: Path, old: bool) -> None:
    folder, file = checkpoint(tmp_path)
    if old:
        without_head(folder, file)
    assert problems(folder) == []
    head = file.tensors[0].offset
    edges = {0, 8, head - 1, file.bytes - 1}
    for record in file.tensors:
        edges |= {record.offset, record.offset + record.bytes - 1} if record.bytes else set()
    for at in sorted(edges):
        flip(folder / file.name, at)
        told = problems(folder)
        assert len(told) == 1
        assert told[0].startswith(file.name)
        if not old:
            inside = [r.name for r in file.tensors if r.offset <= at < r.offset + r.bytes]
            what = f"tensor {inside[0]} is damaged" if inside else "is damaged outside its tensors"
            assert told == [f"{file.name}: {what}"]
        flip(folder / file.name, at)
    assert problems(folder) == []


def test_all_damaged_tensors_are_named_and_other_files_are_looked_at_too(tmp_path: Path) -> None:
    folder, file = checkpoint(tmp_path)
    for record in file.tensors:
        if record.bytes:
            flip(folder / file.name, record.offset)
    (folder / "rank-00000.pt").unlink()
    told = problems(folder)
    named = {f"{file.name}: tensor {record.name} is damaged" for record in file.tensors if record.bytes}
    assert set(told) == {*named, "rank-00000.pt: No such file or directory"}


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    folder, file = checkpoint(tmp_path)
    with open(folder / file.name, "ab") as more:
        more.write(b"\0")
    assert problems(folder) == [f"{file.name}: has {file.bytes + 1} bytes instead of {file.bytes}"]
