"""Which folder a word means, and which checkpoint in it: what the commands of ``transom ckpt`` share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from transom_cli.ask import client, finished, job_view
from transom_cli.complete import complete_jobs
from transomd.errors import NotFoundError, RefusedError, TransomError, UnreachableError
from transomd.tce.catalogue import Checkpoint, list_checkpoints
from transomd.tce.retention import without_manifest
from transomd.words import ExitCode

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
    if _is_folder(where):
        return Path(where).expanduser()
    try:
        job = job_view(client(), where)["job"]
    except (NotFoundError, UnreachableError) as error:
        error.hint += f"; or write ./{where} if you mean a folder"
        raise
    return Path(str(job["checkpoint_dir"]))


def job_ended(where: str) -> bool:
    """Whether a word means a job that has come to its end; False for folders, of which nobody knows."""
    return not _is_folder(where) and finished(job_view(client(), where)["job"])


def _is_folder(where: str) -> bool:
    return "/" in where or where in (".", "..") or os.path.isdir(Path(where).expanduser())


def found_in(folder: Path) -> Sequence[Checkpoint]:
    """Return the checkpoints in ``folder``, newest first, at least one. Raises NotFoundError, RefusedError."""
    try:
        found = list_checkpoints(folder)
    except PermissionError:
        raise RefusedError(f"reading checkpoints in {folder}: permission denied", hint=f"ls -ld {folder}") from None
    except OSError as error:
        raise TransomError(f"reading checkpoints in {folder}: {error.strerror}", hint=f"ls -ld {folder}") from None
    if not found:
        there = folder.is_dir()
        cause = "no checkpoint is there yet" if there else "there is no such folder"
        hint = f"ls -la {folder if there else _nearest(folder)}"
        raise NotFoundError(f"reading checkpoints in {folder}: {cause}", hint=hint)
    return found


def _nearest(folder: Path) -> Path:
    """The innermost folder on the way to one that is not there."""
    return next((place for place in folder.parents if place.is_dir()), Path("/"))


def completed_once(item: Checkpoint) -> bool:
    """Whether a checkpoint was completed once, whatever became of it; also where that cannot be found out."""
    return item.complete or not without_manifest(item.path)


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
    """Return the checkpoint if it is complete. NotFoundError, RefusedError or DamagedError say why it is not."""
    if item.complete:
        return item
    cause = item.problem or "incomplete"
    if not os.access(item.path, os.R_OK | os.X_OK):
        raise RefusedError(f"reading {item.path}: permission denied", hint=f"ls -ld {item.path}")
    if completed_once(item):
        hint = f"transom ckpt verify {where} --step {item.step}"
        raise DamagedError(f"reading {item.path}: damaged: {cause}", hint=hint)
    raise NotFoundError(f"reading {item.path}: {cause}", hint=f"transom ckpt where {where} {item.step}")


class DamagedError(TransomError):
    """A checkpoint is damaged."""

    exit_code = ExitCode.UNHEALTHY


def described(item: Checkpoint) -> dict[str, object]:
    """Return what is known of a checkpoint from a look at it."""
    return {
        "step": item.step,
        "epoch": item.epoch,
        "complete": item.complete,
        "bytes": item.bytes,
        "ranks": item.ranks,
        "path": str(item.path),
        "created": item.created or None,
        "problem": item.problem,
    }
