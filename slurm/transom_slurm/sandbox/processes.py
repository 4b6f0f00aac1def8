"""Finding and ending the processes of one sandbox, and no others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.scripts import TAG
from transom_slurm.sandbox.waiting import until

_PROC = Path("/proc")


def environment(pid: int) -> dict[str, str]:
    """A process's initial environment; empty when it is gone, a zombie, or another user's."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {key: value for key, sep, value in pairs if sep}


def name(pid: int) -> str:
    """A process's short name; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """The parent's pid; 0 when there is none or the process is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def state(pid: int) -> str:
    """The state letter of proc(5), ``T`` for stopped; empty when gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def every_pid() -> list[int]:
    """All processes that this one can see."""
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]


def _same_file(pid: int, path: Path) -> bool:
    """Whether the process sees the same file at this path: the same path may exist in two chroots."""
    try:
        return os.path.samefile(f"/proc/{pid}/root{path}", path)
    except OSError:
        return False


def owned(conf: Path) -> set[int]:
    """Processes that the sandbox with this slurm.conf started, and the jobs in it.

    A person's shell that merely points at the sandbox (SLURM_CONF alone) is not one of them.
    """
    return {pid for pid in every_pid() if is_owned(pid, conf)}


def is_owned(pid: int, conf: Path) -> bool:
    """Whether the sandbox with this slurm.conf started the process, or it belongs to a job in it."""
    env = environment(pid)
    job = env.get("SLURM_CONF") == str(conf) and "SLURM_JOB_ID" in env
    return (job or env.get(TAG) == str(conf)) and _same_file(pid, conf)


def namespace(pid: int, kind: str) -> str:
    """The identity of a process's namespace (``net``, ``pid``, ...); empty when it is gone."""
    try:
        return os.readlink(_PROC / str(pid) / "ns" / kind)
    except OSError:
        return ""


def members(pids: Iterable[int], kind: str) -> set[int]:
    """Processes that share a namespace with living ones; our own namespace does not count."""
    shared = {namespace(pid, kind) for pid in pids} - {"", namespace(os.getpid(), kind), namespace(1, kind)}
    return {pid for pid in every_pid() if namespace(pid, kind) in shared}


def descendants(pids: Iterable[int]) -> set[int]:
    """The processes themselves and all below them."""
    children: dict[int, list[int]] = {}
    for pid in every_pid():
        children.setdefault(parent(pid), []).append(pid)
    found: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, []))
    return found


def ourselves() -> set[int]:
    """This process and those above it, which are never ended."""
    found, pid = {0, 1}, os.getpid()
    while pid > 1:
        found.add(pid)
        pid = parent(pid)
    return found


def signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each; those already gone are skipped."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def stop(pids: Iterable[int], timeout_s: float = 30.0) -> None:
    """SIGSTOP to each, and wait until all of their threads stand still; those already gone are skipped.

    The signal is not yet obeyed when kill(2) returns: until one of its threads was run, all go on.
    Raises SandboxError when one does not obey in time, as it waits for a disk or a network in the kernel.
    """
    wanted = set(pids)
    signal_each(wanted, signal.SIGSTOP)
    if not until(lambda: not any(map(_runs, wanted)), timeout_s):
        left = sorted(pid for pid in wanted if _runs(pid))
        raise SandboxError(
            f"stop processes {left}", f"not obeyed within {timeout_s:g} s", hint=f"ps -o stat,wchan {left[0]}"
        )


def _runs(pid: int) -> bool:
    """Whether one of its threads neither stands still nor is at its end."""
    try:
        tasks = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return False
    return any(state(int(task)) not in ("T", "t", "Z", "X", "") for task in tasks)


def end_all(find: Callable[[], set[int]], timeout_s: float = 15.0) -> set[int]:
    """SIGKILL what ``find`` finds until it finds nothing; returns what is left after the timeout."""
    deadline = time.monotonic() + timeout_s
    spare = ourselves()
    while left := {pid for pid in find() - spare if state(pid) not in ("Z", "X", "")}:
        if time.monotonic() > deadline:
            return left
        signal_each(left, signal.SIGKILL)
        time.sleep(0.01)
    return set()
