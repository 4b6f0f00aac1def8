"""``transom ckpt``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from transom_cli.ask import client, job_view
from transom_cli.complete import complete_jobs
from transom_cli.text import ago, plain, size, table, width
from transomd.errors import NotFoundError, RefusedError, TransomError
from transomd.tce.catalogue import Checkpoint, list_checkpoints, verify
from transomd.words import ExitCode

HEADER = ("STEP", "EPOCH", "RANKS", "SIZE", "AGE", "STATE")
LIMITS = (12, 6, 6, 10, 12, 0)


@click.group()
def ckpt() -> None:
    """List and verify checkpoints: of a JOB (id or name), or in a folder DIR, which needs no daemon."""


@ckpt.command("list")
@click.argument("where", metavar="JOB|DIR", shell_complete=complete_jobs)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_command(where: str, as_json: bool) -> int:
    """List checkpoints, newest first: whole ones and what is left of others. Sizes are looked at, bytes are not read.

    \b
    Examples:
      transom ckpt list demo
      transom ckpt list ./checkpoints/demo
    """
    folder = _folder(where)
    found = _found(folder)
    if as_json:
        print(json.dumps({"directory": str(folder), "checkpoints": [_json(item) for item in found]}, indent=2))
        return ExitCode.OK
    now = time.time()
    rows = [
        (str(c.step), str(c.epoch), str(c.ranks or "-"), size(c.bytes), ago(c.created, now), _state(c)) for c in found
    ]
    print("\n".join(table(HEADER, rows, LIMITS, width())))
    return ExitCode.OK


@ckpt.command("verify")
@click.argument("where", metavar="JOB|DIR", shell_complete=complete_jobs)
@click.option("--step", type=click.IntRange(0), default=None, metavar="N", help="Only this step.")
def verify_command(where: str, step: int | None) -> int:
    """Read every byte of the complete checkpoints and compare the digests. Exit code 6 when one is damaged.

    \b
    Examples:
      transom ckpt verify demo
      transom ckpt verify ./checkpoints/demo --step 400
    """
    folder = _folder(where)
    complete = [item for item in _found(folder) if item.complete and step in (None, item.step)]
    if not complete:
        which = f" of step {step}" if step is not None else ""
        raise NotFoundError(
            f"verifying {folder}: no complete checkpoint{which} is there", hint=f"transom ckpt list {where}"
        )
    damaged = [item for item in complete if not _verified(item)]
    print(f"{len(complete) - len(damaged)} of {len(complete)} checkpoints are good")
    return ExitCode.UNHEALTHY if damaged else ExitCode.OK


def _verified(item: Checkpoint) -> bool:
    problems = verify(item.path)
    print(f"step {item.step} epoch {item.epoch}: {'damaged' if problems else 'good'}", flush=True)
    for problem in problems:
        print(f"  {plain(item.path.name)}/{plain(problem)}")
    return not problems


def _folder(where: str) -> Path:
    """Return the folder that a word means: a folder that exists, or is written as one; else a job's."""
    path = Path(where).expanduser()
    if "/" in where or where in (".", "..") or path.is_dir():
        return path
    job = job_view(client(), where)["job"]
    return Path(str(job["checkpoint_dir"]))


def _found(folder: Path) -> Sequence[Checkpoint]:
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


def _state(item: Checkpoint) -> str:
    return "complete" if item.complete else item.problem or "incomplete"


def _json(item: Checkpoint) -> dict[str, object]:
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
