"""``transom ckpt gc``."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from transom_cli.commands.ckpt_bar import ByteBar
from transom_cli.commands.ckpt_find import DamagedError, as_json_option, folder_of, found_in, job_ended, place
from transom_cli.commands.ckpt_verify import verified
from transom_cli.progress import working
from transom_cli.text import plain, size
from transomd.errors import RefusedError
from transomd.tce import retention
from transomd.tce.catalogue import Checkpoint, list_checkpoints, newest_epoch
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
    good one is never removed. Nor is any complete one while the newest start
    of the program has completed none: it may go on from any of them.

    \b
    What cannot be complete any more: folders without a manifest that are older
    than a complete one, or that were written by a start of the program which a
    newer one has taken over from. Damaged ones stay, for you to look at.
    What an import that was killed has left goes once it is a day old.

    \b
    Examples:
      transom ckpt gc demo --dry-run
      transom ckpt gc ./checkpoints/demo --keep 1
    """
    folder = folder_of(where)
    imports = _abandoned_imports(folder)
    found = list_checkpoints(folder) if imports else found_in(folder)
    epoch = newest_epoch(folder) or 0
    unfinished = _unfinished(found, epoch)
    surplus = [item for item in found if item.path in set(retention.surplus(found, keep, [], epoch))]
    needed = surplus and _may_be_resumed_from(found, epoch) and not job_ended(where)
    if surplus and not needed:
        _check_one_is_good([item for item in found if item.complete and item not in surplus], where)
    going = sorted([*([] if needed else surplus), *unfinished], key=lambda item: item.order)
    with working("removing checkpoints"):
        left = [] if dry_run else [item for item in going if not _removed(item.path)]
        kept = [] if dry_run else [path for path in imports if not _removed(path)]
    _tell(going, left, dry_run, as_json, [(path, path in kept) for path in imports])
    if needed:
        raise RefusedError(
            f"removing complete checkpoints in {folder}: start {epoch} of the program may go on from any of them, "
            "as it has completed none yet",
            hint="the same again once it has; if it never will, name the job that has ended instead of its folder",
        )
    return ExitCode.ERROR if left or kept else ExitCode.OK


def _abandoned_imports(folder: Path) -> list[Path]:
    """Return them; none where the folder cannot be read, which whoever looks for checkpoints in it is told."""
    with contextlib.suppress(OSError):
        return retention.abandoned_imports(folder, time.time())
    return []


def _may_be_resumed_from(found: Sequence[Checkpoint], epoch: int) -> bool:
    """Whether the newest start has completed nothing: it may have been sent back to an old step, and be so again."""
    return not any(item.complete and item.epoch >= epoch for item in found)


def _unfinished(found: Sequence[Checkpoint], epoch: int) -> list[Checkpoint]:
    """Folders that can never be complete: superseded ones, and those of starts that are fenced."""
    paths = set(retention.leftovers(found, [], epoch))
    return [
        item
        for item in found
        if item.path in paths or (not item.complete and item.epoch < epoch and retention.without_manifest(item.path))
    ]


def _check_one_is_good(staying: Sequence[Checkpoint], where: str) -> None:
    with ByteBar("verifying", sum(item.bytes for item in staying)) as bar:
        if any(not verified(item, bar) for item in staying):
            return
    raise DamagedError(
        f"removing old checkpoints: all {len(staying)} that would stay are damaged, so none is removed",
        hint=f"transom ckpt verify {where}",
    )


def _removed(path: Path) -> bool:
    retention.remove_checkpoint(path)
    return not path.exists()


def _tell(
    going: Sequence[Checkpoint],
    left: Sequence[Checkpoint],
    dry_run: bool,
    as_json: bool,
    imports: Sequence[tuple[Path, bool]],
) -> None:
    """``imports``: folders of imports that were killed, and of each whether it should have gone and is still there."""
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
        others = [{"path": str(path), "removed": not (dry_run or stays)} for path, stays in imports]
        print(json.dumps({"dry_run": dry_run, "checkpoints": told, "imports": others}, indent=2))
        return
    verb = "would remove" if dry_run else "removed"
    for item in going:
        kind = "complete" if item.complete else "incomplete"
        word = "could not remove" if item in left else verb
        print(f"{word} step {item.step} epoch {item.epoch}: {kind}, {size(item.bytes)}")
    for path, stays in imports:
        print(f"{'could not remove' if stays else verb} {plain(path.name)}: an import that was killed")
    freed = sum(item.bytes for item in going if item not in left)
    count = len(going) - len(left)
    print(f"{verb} {count} checkpoint{'' if count == 1 else 's'}, {size(freed)}")
