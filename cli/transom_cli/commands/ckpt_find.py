"""Which folder a word means, and which checkpoint in it: what the commands of ``transom ckpt`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from transom_cli.ask import client, job_view
from transom_cli.complete import complete_jobs
from transomd.errors import NotFoundError, RefusedError, TransomError
from transomd.tce.catalogue import Checkpoint, list_checkpoints

NEWEST = -1


def step_word(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return the step that a word means: its number, or ``NEWEST`` for ``newest``."""
    if value == "newest":
        return NEWEST
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is no step: give its number, or newest", ctx, param)
    return int(value)


place = click.argument("where", metavar="JOB|DIR", shell_complete=complete_jobs)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
step_argument = click.argument("step", metavar="[STEP]", default="newest", callback=step_word)
epoch_option = click.option("--epoch", type=click.IntRange(0), metavar="N", help="As this epoch saved it.")


def folder_of(where: str) -> Path:
    """Return the folder that a word means: a folder that exists, or is written as one; else a job's."""
    path = Path(where).expanduser()
    if "/" in where or where in (".", "..") or path.is_dir():
        return path
    job = job_view(client(), where)["job"]
    return Path(str(job["checkpoint_dir"]))


def found_in(folder: Path) -> Sequence[Checkpoint]:
    """Return the checkpoints in ``folder``, newest first, at least one. Raises NotFoundError, RefusedError."""
    try:
        found = list_checkpoints(folder)
    except PermissionError:
        raise RefusedError(f"reading checkpoints in {folder}: permission denied", hint=f"ls -ld {folder}") from None
    except OSError as error:
        raise TransomError(f"reading checkpoints in {folder}: {error.strerror}", hint=f"ls -ld {folder}") from None
    if not found:
        cause = "no checkpoint is there yet" if folder.is_dir() else "there is no such folder"
        raise NotFoundError(f"reading checkpoints in {folder}: {cause}", hint=f"ls -la {folder}")
    return found


def one_of(where: str, step: int, epoch: int | None) -> Checkpoint:
    """Return one checkpoint, whole or not, but the newest *complete* one for ``NEWEST``. Raises NotFoundError."""
    folder = folder_of(where)
    found = [item for item in found_in(folder) if epoch in (None, item.epoch)]
    fitting = [item for item in found if (item.complete if step == NEWEST else item.step == step)]
    if not fitting:
        which = "complete checkpoint" if step == NEWEST else f"checkpoint of step {step}"
        raise NotFoundError(
            f"looking into {folder}: no {which}{'' if epoch is None else f' of epoch {epoch}'} is there",
            hint=f"transom ckpt list {where}",
        )
    return max(fitting, key=lambda item: (item.complete, item.order))


def whole(item: Checkpoint, where: str) -> Checkpoint:
    """Return the checkpoint if it is complete; NotFoundError says what it lacks."""
    if item.complete:
        return item
    cause = item.problem or "incomplete"
    raise NotFoundError(f"reading {item.path}: {cause}", hint=f"transom ckpt where {where} {item.step}")


def described(item: Checkpoint) -> dict[str, object]:
    """Return what is known of a checkpoint from a look at it."""
    return {
        "step": item.step,
        "epoch": item.epoch,
        "complete": item.complete,
        "bytes": item.bytes,
        "ranks": item.ranks,
        "path": str(item.path),
        "created": item.created,
        "problem": item.problem,
    }
