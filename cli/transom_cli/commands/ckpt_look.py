"""``transom ckpt show`` and ``where``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence

import click

from transom_cli.commands.ckpt_find import as_json_option, described, epoch_option, one_of, place, step_argument, whole
from transom_cli.tensorpage import LARGEST, Wholes, held, largest, part_table, tensor_table, type_table
from transom_cli.text import ago, plain, size, table, width
from transom_cli.wholes import DCP, whole_shapes
from transomd.errors import RefusedError, TransomError
from transomd.tce.catalogue import Checkpoint, load_parts
from transomd.tce.manifest import MANIFEST, Part, StepManifest, read_step_manifest
from transomd.words import ExitCode

FILES = ("RANK", "TIER", "SIZE", "FILE")
FILE_LIMITS = (6, 8, 10, 0)
_RANKED = re.compile(r"\.?(?:rank|replica)-(\d+)(?:-[0-9a-f]{8})?\.")


@click.command("show", short_help="Keys and tensors of one, and who wrote them.")
@place
@step_argument
@epoch_option
@click.option("--tensors", "every", is_flag=True, help="Every tensor, not the ten largest alone.")
@as_json_option
def show_command(where: str, step: int, epoch: int | None, every: bool, as_json: bool) -> int:
    """Show what a checkpoint holds: its keys, who wrote and who loads them, the types of its tensors, and the ten
    largest with their shapes and sizes; of a share of a DTensor also the shape of the whole (this needs torch).

    \b
    Examples:
      transom ckpt show demo
      transom ckpt show demo newest --tensors
      transom ckpt show ./checkpoints/demo 400 --json
    """
    item = whole(one_of(where, step, epoch), where)
    manifest, parts = _read(item, where)
    if as_json:
        print(json.dumps(_shown(item, manifest, parts, _wholes(item, manifest, parts) if every else {}), indent=2))
        return ExitCode.OK
    ranks = f"{item.ranks} rank{'' if item.ranks == 1 else 's'}"
    age = ago(item.created, time.time())
    print(f"step {item.step} of epoch {item.epoch}: {size(item.bytes)} of {ranks}, complete since {age}")
    print(f"  {plain(item.path)}\n")
    print("\n".join([*part_table(manifest, parts, width()), ""]))
    print("\n".join(_tensors(item, manifest, parts, every)))
    return ExitCode.OK


def _tensors(item: Checkpoint, manifest: StepManifest, parts: Sequence[Part], every: bool) -> list[str]:
    """The types, then all tensors or the largest; of these alone are the wholes looked up."""
    there = held(parts)
    shown = there if every or len(there) <= LARGEST else largest(there)
    needed = {one.part for one in shown}
    wholes = _wholes(item, manifest, [part for part in parts if part.name in needed])
    lines = [*type_table(there, width()), ""] if there else []
    if len(shown) < len(there):
        lines += [f"the {len(shown)} largest of {len(there)} tensors (--tensors shows all)"]
    return lines + tensor_table(shown, wholes, width())


def _wholes(item: Checkpoint, manifest: StepManifest, parts: Sequence[Part]) -> Wholes:
    by_dcp = any(DCP in part.keys for part in manifest.parts)
    return whole_shapes(item.path, parts, by_dcp=by_dcp)


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


def _shown(item: Checkpoint, manifest: StepManifest, parts: Sequence[Part], wholes: Wholes) -> dict[str, object]:
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
                        **({"whole": list(wholes[part.name, t.name])} if (part.name, t.name) in wholes else {}),
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
