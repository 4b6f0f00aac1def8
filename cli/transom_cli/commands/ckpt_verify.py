"""``transom ckpt verify``."""

from __future__ import annotations

import json

import click

from transom_cli.commands.ckpt_bar import ByteBar
from transom_cli.commands.ckpt_find import as_json_option, folder_of, found_in, place
from transom_cli.text import plain
from transomd.errors import NotFoundError
from transomd.tce.catalogue import Checkpoint, Damage, damages
from transomd.words import ExitCode


@click.command("verify", short_help="Read every byte; name what is damaged.")
@place
@click.option("--step", type=click.IntRange(0), default=None, metavar="N", help="Only this step.")
@as_json_option
def verify_command(where: str, step: int | None, as_json: bool) -> int:
    """Read every byte of the complete checkpoints and compare the digests.

    \b
    Of each damaged file the first damaged tensor is named, with the bytes of
    the file in which it lies. Exit code 0: all are good; 6: one is damaged.

    \b
    Examples:
      transom ckpt verify demo
      transom ckpt verify ./checkpoints/demo --step 400
    """
    folder = folder_of(where)
    complete = [item for item in found_in(folder) if item.complete and step in (None, item.step)]
    if not complete:
        which = f" of step {step}" if step is not None else ""
        raise NotFoundError(
            f"verifying {folder}: no complete checkpoint{which} is there", hint=f"transom ckpt list {where}"
        )
    told = []
    for item in complete:
        found = verified(item)
        told.append({**_described(item), "damages": [_damage(damage) for damage in found]})
        if not as_json:
            _tell(item, found)
    damaged = sum(bool(one["damages"]) for one in told)
    if as_json:
        print(json.dumps({"directory": str(folder), "checkpoints": told}, indent=2))
    else:
        print(f"{len(complete) - damaged} of {len(complete)} checkpoints are good")
    return ExitCode.UNHEALTHY if damaged else ExitCode.OK


def verified(item: Checkpoint) -> list[Damage]:
    """Read every byte of a checkpoint, with a bar where that takes long; return what is damaged."""
    with ByteBar(f"verifying step {item.step}", item.bytes) as bar:
        return damages(item.path, bar.advance)


def _tell(item: Checkpoint, found: list[Damage]) -> None:
    print(f"step {item.step} epoch {item.epoch}: {'damaged' if found else 'good'}", flush=True)
    for damage in found:
        print(f"  {plain(item.path.name)}/{plain(damage)}{_range(damage)}")


def _range(damage: Damage) -> str:
    return f" (bytes {damage.offset} to {damage.offset + damage.bytes - 1})" if damage.bytes else ""


def _described(item: Checkpoint) -> dict[str, object]:
    return {"step": item.step, "epoch": item.epoch, "path": str(item.path), "bytes": item.bytes}


def _damage(damage: Damage) -> dict[str, object]:
    return {
        "file": damage.file,
        "tensor": damage.tensor,
        "offset": damage.offset,
        "bytes": damage.bytes,
        "problem": damage.text,
    }
