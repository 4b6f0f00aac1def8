"""Finding and ending a job's own processes on this node. Standard library only; acts as the user it runs as."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process of a launch. ``state`` is the letter of proc(5): R S D T t; ``wchan`` is where it sleeps.

    ``rank`` is that of the task where a job's own script starts it by srun and gives it none.
    ``switches``: how often the kernel took it from a processor, so that while it stays the same it does not run.
    """

    pid: int
    epoch: int
    rank: int | None
    local_rank: int | None
    state: str
    switches: int
    wchan: str
    command: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def find_ranks(job_id: int) -> list[RankProcess]:
    """Return every process of the job's program on this node: those whose environment carries the job and an epoch."""
    found = []
    for name in os.listdir(PROC):
        if name.isdigit() and int(name) != os.getpid():
            process = _read(int(name), job_id)
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda p: (p.epoch, p.rank if p.rank is not None else -1, p.pid))


def kill_ranks(job_id: int, epoch: int, *, grace_s: float = 0.0, deadline_s: float = 8.0) -> list[RankProcess]:
    """End every process of launches up to ``epoch``; return what is still there (state D, usually) at the deadline.

    With ``grace_s`` they get SIGTERM first. A stopped process dies of SIGKILL too.
    """
    end = time.monotonic() + deadline_s
    if grace_s > 0:
        _signal(_up_to(job_id, epoch), signal.SIGTERM)
        _wait(job_id, epoch, min(end, time.monotonic() + grace_s))
    while True:
        left = _up_to(job_id, epoch)
        if not left or time.monotonic() > end:
            return left
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)


def _wait(job_id: int, epoch: int, until: float) -> None:
    while time.monotonic() < until and _up_to(job_id, epoch):
        time.sleep(0.05)


def _up_to(job_id: int, epoch: int) -> list[RankProcess]:
    return [p for p in find_ranks(job_id) if p.epoch <= epoch and p.state != "Z"]


def _signal(processes: list[RankProcess], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _read(pid: int, job_id: int) -> RankProcess | None:
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        status = (PROC / str(pid) / "status").read_bytes()
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    env = dict(part.split(b"=", 1) for part in raw.split(b"\0") if b"=" in part)
    epoch = env.get(b"TRANSOM_EPOCH", b"")
    if env.get(b"TRANSOM_JOB_ID") != str(job_id).encode() or not epoch.isdigit():
        return None
    return RankProcess(
        pid=pid,
        epoch=int(epoch),
        rank=_number(env.get(b"RANK", env.get(b"SLURM_PROCID"))),
        local_rank=_number(env.get(b"LOCAL_RANK")),
        state=stat.rpartition(")")[2].split()[0],
        switches=sum(map(int, _SWITCHES.findall(status))),
        wchan=_wchan(pid),
        command=command.replace(b"\0", b" ").decode(errors="replace").strip()[:200],
    )


def _wchan(pid: int) -> str:
    try:
        return (PROC / str(pid) / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw and raw.isdigit() else None
