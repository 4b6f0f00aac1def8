"""``transom logs``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from transom_cli.ask import Json, client, finished, job_id
from transom_cli.complete import complete_jobs
from transom_cli.tail import LogFile, Tail, log_files
from transom_cli.text import log_line
from transomd.api.client import Client
from transomd.errors import NotFoundError, UnreachableError
from transomd.words import ExitCode

POLL_S = 0.3
STATE_S = 2.0
FIRST_LINES = 10


@click.command()
@click.argument("job", shell_complete=complete_jobs)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, across restarts, until the job ends.")
@click.option("--rank", type=click.IntRange(0), default=None, metavar="R", help="Only this rank.")
@click.option("--epoch", type=click.IntRange(0), default=None, metavar="E", help="This launch instead of the newest.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=None, metavar="N", help="Only the last N lines of each rank."
)
def logs(job: str, follow: bool, rank: int | None, epoch: int | None, lines: int | None) -> int:
    """Show what the ranks of JOB printed: the newest launch, rank by rank. The files are read as you, from the job's
    run folder. With more than one rank each line bears its epoch and rank.

    \b
    Examples:
      transom logs demo -f                 all ranks, the last 10 lines first
      transom logs demo --rank 0 --epoch 2
      transom logs 12 -n 100
    """
    api = client()
    number = job_id(api, job)
    found = api.get(f"/v1/jobs/{number}")["job"]
    run_dir = Path(str(found["run_dir"]))
    if follow:
        return _follow(api, number, _Reader(run_dir, rank, epoch, FIRST_LINES if lines is None else lines))
    reader = _Reader(run_dir, rank, epoch, lines)
    if not reader.look():
        raise _none(found, run_dir, rank, epoch)
    reader.show(end=True)
    return ExitCode.OK


def _none(job: Json, run_dir: Path, rank: int | None, epoch: int | None) -> NotFoundError:
    """Say that a job has no such log: whether one may still come, and which there are."""
    which = (f" of rank {rank}" if rank is not None else "") + (f" of epoch {epoch}" if epoch is not None else "")
    number, state = job["id"], f"it is {job['state']}, {job['reason']}"
    own = run_dir / "logs" / "launcher.log"
    look = f"; the launcher's own is {own}" if own.exists() else ""
    if not finished(job):
        hint = f"transom status {number}, or transom logs {number} -f to wait for it{look}"
        return NotFoundError(f"job {number} has no log{which} yet: {state}", hint=hint)
    there = log_files(run_dir)
    if not there:
        return NotFoundError(f"job {number} has no log{which}: {state}", hint=f"transom status {number}{look}")
    ranks, epochs = {file.rank for file in there}, {file.epoch for file in there}
    cause = f"there are those of ranks {min(ranks)} to {max(ranks)} and epochs {min(epochs)} to {max(epochs)}"
    return NotFoundError(f"job {number} has no log{which}: {cause}", hint=f"transom logs {number}")


class _Reader:
    """The logs of a job that are shown, and how far each is read."""

    def __init__(self, run_dir: Path, rank: int | None, epoch: int | None, last_lines: int | None) -> None:
        self._run_dir, self._rank, self._epoch, self._last = run_dir, rank, epoch, last_lines
        self._tails: dict[LogFile, Tail] = {}
        self._first_epoch: int | None = None
        self._terminal = sys.stdout.isatty()

    def look(self) -> int:
        """Take up logs that are new; return how many are known. The first look takes the newest epoch only."""
        files = log_files(self._run_dir, epoch=self._epoch, rank=self._rank)
        first = self._first_epoch
        if first is None and files:
            first = self._first_epoch = files[-1].epoch
        for file in files:
            if file not in self._tails and file.epoch >= (first or 0):
                self._tails[file] = Tail(file.path, last_lines=self._last if file.epoch == first else None)
        return len(self._tails)

    def show(self, *, end: bool = False) -> bool:
        """Print what was added, with ``end`` also lines that have no end; return whether there was anything."""
        any_new = False
        for file, tail in list(self._tails.items()):
            for line in tail.lines():
                self._print(file, line)
                any_new = True
            rest = tail.rest() if end else None
            if rest is not None:
                self._print(file, rest)
        sys.stdout.flush()
        return any_new

    def _print(self, file: LogFile, line: str) -> None:
        prefix = f"[e{file.epoch} r{file.rank}] " if len(self._tails) > 1 else ""
        print(prefix + log_line(line, terminal=self._terminal))


def _follow(api: Client, number: int, reader: _Reader) -> int:
    """Print what comes until the job has ended and its last lines are read."""
    asked, ended = 0.0, False
    while True:
        last = ended
        if time.monotonic() - asked >= STATE_S and not ended:
            ended, asked = _ended(api, number), time.monotonic()
        reader.look()
        reader.show(end=last)
        if last:
            return ExitCode.OK
        time.sleep(POLL_S)


def _ended(api: Client, number: int) -> bool:
    try:
        return finished(api.get(f"/v1/jobs/{number}")["job"])
    except UnreachableError:
        # The files go on growing without the daemon; whether the job has ended is simply not known now.
        return False
