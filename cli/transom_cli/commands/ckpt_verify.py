"""``transom ckpt verify``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from transom_cli.commands.ckpt_bar import ByteBar
from transom_cli.commands.ckpt_find import as_json_option, completed_once, folder_of, found_in, place
from transom_cli.text import plain
from transomd.errors import NotFoundError
from transomd.tce.catalogue import Checkpoint, Damage, damages
from transomd.words import ExitCode


@click.command("verify", short_help="Read every byte; name what is damaged.")
@place
@click.option("--step", type=click.IntRange(0), default=None, metavar="N", help="Only this step.")
@as_json_option
def verify_command(where: str, step: int | None, as_json: bool) -> int:
    """Read every byte of the checkpoints that were completed and compare the digests.

    \b
    Of each damaged file the first damaged tensor is named, with the bytes of
    the file in which it lies. What was never completed is not looked at.
    Exit code 0: all are good; 6: one is damaged; 7: one could not be read.

    \b
    Examples:
      transom ckpt verify demo
      transom ckpt verify ./checkpoints/demo --step 400
    """
    folder = folder_of(where)
    found = [item for item in found_in(folder) if step in (None, item.step)]
    whole = [item for item in found if completed_once(item)]
    if not whole:
        which = f" of step {step}" if step is not None else ""
        raise NotFoundError(
            f"verifying {folder}: no complete checkpoint{which} is there", hint=f"transom ckpt list {where}"
        )
    told: list[tuple[Checkpoint, list[Damage]]] = []
    with ByteBar("verifying", sum(item.bytes for item in whole)) as bar:
        for item in whole:
            told.append((item, verified(item, bar)))
            if not as_json:
                _tell(*told[-1])
    if as_json:
        checkpoints = [{**_described(item), "damages": [_damage(one) for one in problems]} for item, problems in told]
        print(json.dumps({"directory": str(folder), "checkpoints": checkpoints}, indent=2))
    else:
        good = sum(not problems for _, problems in told)
        print(f"{good} of {len(whole)} checkpoints are good{_left_out(len(found) - len(whole))}")
    return _code([one.unread for _, problems in told for one in problems])


def verified(item: Checkpoint, bar: ByteBar) -> list[Damage]:
    """Read every byte of a checkpoint; return what is damaged, and what could not be read."""
    bar.turn_to(f"verifying step {item.step}")
    found = damages(item.path, bar.advance)
    bar.hide()
    return found


def _code(unread: Sequence[bool]) -> int:
    """What is damaged comes before what is not known."""
    if not unread:
        return ExitCode.OK
    return ExitCode.UNKNOWN if all(unread) else ExitCode.UNHEALTHY


def _left_out(count: int) -> str:
    return f"; {count} incomplete, not looked at" if count else ""


def _tell(item: Checkpoint, found: Sequence[Damage]) -> None:
    verdict = "could not be read" if all(damage.unread for damage in found) else "damaged"
    print(f"step {item.step} epoch {item.epoch}: {verdict if found else 'good'}", flush=True)
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
        "unread": damage.unread,
    }
