"""``transom ckpt show`` and ``where``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence

import click

from transom_cli.commands.ckpt_find import as_json_option, described, epoch_option, one_of, place, step_argument, whole
from transom_cli.text import ago, clip, plain, size, table, width
from transomd.errors import RefusedError, TransomError
from transomd.tce.catalogue import Checkpoint, load_parts
from transomd.tce.manifest import MANIFEST, Part, PartEntry, StepManifest, TensorRecord, read_step_manifest
from transomd.words import ExitCode

PARTS = ("PART", "WRITTEN BY", "LOADED BY", "SIZE", "TENSORS", "KEYS")
PART_LIMITS = (24, 12, 16, 10, 8, 0)
TENSORS = ("TENSOR", "TYPE", "SHAPE", "SIZE", "PART")
TENSOR_LIMITS = (1 << 16, 16, 24, 10, 0)
FILES = ("RANK", "TIER", "SIZE", "FILE")
FILE_LIMITS = (6, 8, 10, 0)
_RANKED = re.compile(r"\.?(?:rank|replica)-(\d+)(?:-[0-9a-f]{8})?\.")


@click.command("show", short_help="Keys and tensors of one, and who wrote them.")
@place
@step_argument
@epoch_option
@as_json_option
def show_command(where: str, step: int, epoch: int | None, as_json: bool) -> int:
    """Show what a checkpoint holds: its keys and tensors, with types, shapes and sizes, who wrote and who loads them.

    \b
    Examples:
      transom ckpt show demo
      transom ckpt show ./checkpoints/demo 400 --json
    """
    item = whole(one_of(where, step, epoch), where)
    manifest, parts = _read(item, where)
    if as_json:
        print(json.dumps(_shown(item, manifest, parts), indent=2))
        return ExitCode.OK
    ranks = f"{item.ranks} rank{'' if item.ranks == 1 else 's'}"
    age = ago(item.created, time.time())
    print(f"step {item.step} of epoch {item.epoch}: {size(item.bytes)} of {ranks}, complete since {age}")
    print(f"  {plain(item.path)}\n")
    entries = {entry.name: entry for entry in manifest.parts}
    rows = [_part_row(entries[part.name], part, manifest.world_size) for part in parts]
    print("\n".join([*table(PARTS, rows, PART_LIMITS, width()), ""]))
    print("\n".join(_tensor_table(_tensor_rows(parts), width())))
    return ExitCode.OK


@click.command("where", short_help="Which files of which rank make up one.")
@place
@step_argument
@epoch_option
@as_json_option
def where_command(where: str, step: int, epoch: int | None, as_json: bool) -> int:
    """Show which files of which rank make up a checkpoint, and which are missing; also of one that is incomplete.

    \b
    Examples:
      transom ckpt where demo
      transom ckpt where ./checkpoints/demo 400
    """
    item = one_of(where, step, epoch)
    files = _files(item)
    if as_json:
        print(json.dumps({**described(item), "files": files}, indent=2))
        return ExitCode.OK
    state = "complete" if item.complete else item.problem or "incomplete"
    print(f"step {item.step} of epoch {item.epoch}: {plain(state)}\n  {plain(item.path)}\n")
    rows = [
        (
            "all" if file["rank"] is None else str(file["rank"]),
            str(file["tier"]),
            "missing" if file["bytes"] is None else size(int(str(file["bytes"]))),
            str(file["name"]),
        )
        for file in files
    ]
    print("\n".join(table(FILES, rows, FILE_LIMITS, width())))
    return ExitCode.OK


def _read(item: Checkpoint, where: str) -> tuple[StepManifest, Sequence[Part]]:
    try:
        manifest = read_step_manifest(item.path)
        return manifest, load_parts(item.path, manifest, {part.name for part in manifest.parts})
    except (OSError, ValueError) as error:
        hint = f"transom ckpt verify {where} --step {item.step}"
        raise TransomError(f"reading {item.path}: {error}", hint=hint) from None


def _part_row(entry: PartEntry, part: Part, ranks: int) -> tuple[str, ...]:
    tensors = sum(len(file.tensors) for file in part.files)
    written = f"rank {entry.writer}"
    return part.name, written, _loaders(part, ranks), size(part.bytes), str(tensors), ", ".join(part.keys)


def _loaders(part: Part, ranks: int) -> str:
    if len(part.ranks) == ranks:
        return "every rank"
    return f"rank {', '.join(map(str, part.ranks))}" if part.ranks else "any rank"


def _tensor_rows(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    return [
        (tensor.name, _type(tensor), "x".join(map(str, tensor.shape)) or "scalar", size(tensor.bytes), part.name)
        for part in parts
        for file in part.files
        for tensor in file.tensors
    ]


def _tensor_table(rows: Sequence[tuple[str, ...]], columns: int) -> list[str]:
    """One line a tensor; two where a name leaves no room for the rest, as every part of a name may tell it apart."""
    lines = table(TENSORS, rows, TENSOR_LIMITS, 0)
    if not columns or max(map(len, lines)) <= columns:
        return lines
    others = table(TENSORS[1:], [row[1:] for row in rows], TENSOR_LIMITS[1:], columns - 2)
    names = [TENSORS[0], *(plain(row[0]) for row in rows)]
    return [line for name, rest in zip(names, others, strict=True) for line in (clip(name, columns), f"  {rest}")]


def _type(tensor: TensorRecord) -> str:
    """Values of torch.distributed.checkpoint lie among the tensors, as bytes with a note."""
    return "value" if tensor.note and tensor.dtype == "uint8" else tensor.dtype


def _shown(item: Checkpoint, manifest: StepManifest, parts: Sequence[Part]) -> dict[str, object]:
    writers = {entry.name: entry.writer for entry in manifest.parts}
    return {
        **described(item),
        "parts": [
            {
                "name": part.name,
                "writer": writers[part.name],
                "ranks": list(part.ranks),
                "keys": list(part.keys),
                "bytes": part.bytes,
                "tensors": [
                    {
                        "name": t.name,
                        "dtype": t.dtype,
                        "shape": list(t.shape),
                        "bytes": t.bytes,
                        "file": file.name,
                        "note": t.note,
                    }
                    for file in part.files
                    for t in file.tensors
                ],
            }
            for part in parts
        ],
    }


def _files(item: Checkpoint) -> list[dict[str, object]]:
    """What is in the folder and what should be, by rank; files of no single rank come last."""
    try:
        with os.scandir(item.path) as entries:
            there: dict[str, int | None] = {entry.name: entry.stat().st_size for entry in entries}
    except PermissionError:
        raise RefusedError(f"reading {item.path}: permission denied", hint=f"ls -ld {item.path}") from None
    except OSError as error:
        raise TransomError(f"reading {item.path}: {error.strerror}", hint=f"ls -la {item.path}") from None
    for name in _expected(item):
        there.setdefault(name, None)
    ordered = sorted((rank is None, rank or 0, name) for name in there for rank in [_rank(name)])
    return [{"rank": _rank(name), "tier": "storage", "bytes": there[name], "name": name} for _, _, name in ordered]


def _expected(item: Checkpoint) -> list[str]:
    try:
        manifest = read_step_manifest(item.path)
    except (OSError, ValueError):
        return [MANIFEST]
    return [*(entry.name for entry in manifest.ranks), *(name for part in manifest.parts for name in part.files)]


def _rank(name: str) -> int | None:
    match = _RANKED.match(name)
    return int(match[1]) if match else None
