"""``transom ckpt gc``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from transom_cli.commands.ckpt_find import as_json_option, folder_of, found_in, place
from transom_cli.commands.ckpt_verify import verified
from transom_cli.text import plain, size
from transomd.errors import TransomError
from transomd.tce import retention
from transomd.tce.catalogue import Checkpoint, newest_epoch
from transomd.tce.manifest import MANIFEST
from transomd.words import ExitCode


@click.command("gc", short_help="Remove old ones, and what is left of others.")
@place
@click.option(
    "--keep", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Complete ones to keep."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@as_json_option
def gc_command(where: str, keep: int, dry_run: bool, as_json: bool) -> int:
    """Remove checkpoints: complete ones but the N newest, and what can never be complete.

    \b
    Before a complete one goes, one of those that stay is read whole: the last
    good one is never removed. What cannot be complete any more: folders
    without a manifest that are older than a complete one, or that were written
    by a start of the program which a newer one has taken over from. Damaged
    ones stay, for you to look at.

    \b
    Examples:
      transom ckpt gc demo --dry-run
      transom ckpt gc ./checkpoints/demo --keep 1
    """
    folder = folder_of(where)
    found = found_in(folder)
    epoch = newest_epoch(folder) or 0
    unfinished = _unfinished(found, epoch)
    surplus = [item for item in found if item.path in set(retention.surplus(found, keep, [], epoch))]
    if surplus:
        _check_one_is_good([item for item in found if item.complete and item not in surplus], where)
    going = sorted([*surplus, *unfinished], key=lambda item: item.order)
    left = [] if dry_run else [item for item in going if not _removed(item)]
    _tell(going, left, dry_run, as_json)
    return ExitCode.ERROR if left else ExitCode.OK


def _unfinished(found: Sequence[Checkpoint], epoch: int) -> list[Checkpoint]:
    """Folders that can never be complete: superseded ones, and those of starts that are fenced."""
    paths = set(retention.leftovers(found, [], epoch))
    return [
        item
        for item in found
        if item.path in paths
        or (not item.complete and item.epoch < epoch and not (item.path / MANIFEST).exists() and item.path.is_dir())
    ]


def _check_one_is_good(staying: Sequence[Checkpoint], where: str) -> None:
    for item in staying:
        if not verified(item):
            return
    raise _DamagedError(
        f"removing old checkpoints: all {len(staying)} that would stay are damaged, so none is removed",
        hint=f"transom ckpt verify {where}",
    )


class _DamagedError(TransomError):
    """There is no good checkpoint among those that would stay."""

    exit_code = ExitCode.UNHEALTHY


def _removed(item: Checkpoint) -> bool:
    retention.remove_checkpoint(item.path)
    return not Path(item.path).exists()


def _tell(going: Sequence[Checkpoint], left: Sequence[Checkpoint], dry_run: bool, as_json: bool) -> None:
    if as_json:
        told = [
            {
                "step": i.step,
                "epoch": i.epoch,
                "bytes": i.bytes,
                "path": str(i.path),
                "removed": not (dry_run or i in left),
            }
            for i in going
        ]
        print(json.dumps({"dry_run": dry_run, "checkpoints": told}, indent=2))
        return
    verb = "would remove" if dry_run else "removed"
    for item in going:
        kind = "complete" if item.complete else "incomplete"
        word = "could not remove" if item in left else verb
        print(f"{word} step {item.step} epoch {item.epoch}: {kind}, {size(item.bytes)}, {plain(item.path)}")
    freed = sum(item.bytes for item in going if item not in left)
    count = len(going) - len(left)
    print(f"{verb} {count} checkpoint{'' if count == 1 else 's'}, {size(freed)}")
