"""Reads what srun and slurmstepd say of a launch's tasks: how each ended, and that not all were waited for. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from transomd.tee.detect import rank_exit
from transomd.tee.types import Evidence
from transomd.words import Role

_EXIT = re.compile(
    r"srun: error: (?P<node>[\w.-]{1,80}): tasks? (?P<ranks>[\d,-]{1,400}): "
    r"(?:Exited with exit code (?P<code>\d{1,3})|(?P<word>Killed|Terminated|Segmentation fault|Bus error|Aborted"
    r"|Illegal instruction|Floating point exception))"
)
_LEFT = re.compile(
    r"^srun: (?:error: )?(?:Job step aborted|Aborting, |\w{1,80}: aborting, io error|Cannot communicate with node"
    r"|Node failure on|Timed out waiting for job step|timeout waiting for task launch"
    r"|Task launch for .{1,200} failed|task \d{1,7} launch failed).*",
    re.MULTILINE,
)
_STEP_ENDED = re.compile(
    r"slurmstepd(?:-[\w.-]{1,80})?: error: \*\*\* STEP (?P<job>\d{1,10})\S{1,50} ON \S{1,80} "
    r"(?:CANCELLED AT|FAILED \().*"
)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
_MAX_RANKS = 16_384


def exits(text: str, at: float | None, *, torn_down: bool = False, a_task: int = 1) -> list[Evidence]:
    """Read how each task ended from srun's stderr. After the first bad end, those killed are only torn down.

    With ``torn_down`` that first end was in an earlier part of the log. No more than a job can have are returned.
    Where there are more than one rank ``a_task`` (torchrun), none of them is named.
    """
    found: list[Evidence] = []
    for match in _EXIT.finditer(text):
        if len(found) >= _MAX_RANKS:
            break
        number = _SIGNALS.get(match["word"] or "")
        told = (torn_down or bool(found)) and number in (signal.SIGKILL, signal.SIGTERM)
        code = int(match["code"]) if match["code"] else 128 + (number or 0)
        ranks = _ranks(match["ranks"]) if a_task == 1 else [None]
        ends = (rank_exit(rank, match["node"], code, at, told=told) for rank in ranks)
        found.extend(end for end in ends if end)
    return found


def left(text: str) -> str:
    """Return the first line in which srun says that it does not wait for every task any more; empty where none does.

    Its exit code is then worth nothing: it is that of the worst task whose end it was told, and 0 where it was told
    of none (``global_rc`` in Slurm's src/srun/srun.c, 22.05 and 24.11; seen with 22.05 while the tasks went on).
    """
    found = _LEFT.search(text)
    return found[0] if found else ""


def step_ended(text: str, slurm_job_id: int | None = None) -> str:
    """Return the first line in which a slurmstepd says that it was told to end its step; empty where none does.

    Of the steps of one Slurm job, where it is given: a program may print the log of another.

    A program that leaves with 0 on SIGTERM, as many do that save then, has not come to its end: Slurm sends it to all
    steps, and to no batch script, when it preempts a job with a ``GraceTime``, and so does ``scancel -s TERM``.
    """
    found = _STEP_ENDED.finditer(text)
    return next((one[0] for one in found if slurm_job_id is None or int(one["job"]) == slurm_job_id), "")


def more_exits(count: int, at: float | None) -> Evidence:
    """Say that srun's log told of more bad ends than are kept."""
    text = f"srun said {count} more times that a task ended badly; those are not listed"
    return Evidence(source="log", signature="EXIT-MORE", text=text, role=Role.CONTEXT, at=at, count=count)


def _ranks(text: str) -> Iterator[int]:
    """Expand ``0-3,7``; no more than a job can have."""
    more = _MAX_RANKS
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            last = min(int(high or low), int(low) + more - 1)
            yield from range(int(low), last + 1)
            more -= max(0, last + 1 - int(low))
