"""Slows processes down: SIGSTOP for a part of every period, SIGCONT for the rest, until SIGTERM.

``duty.py STOPPED RUNNING ranks`` does so to the user's program on this node (processes with RANK and TRANSOM_EPOCH in
their environment, new ones too), ``duty.py STOPPED RUNNING PIDFILE`` to one daemon. Both times are seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

NOT_RANKS = ("srun", "slurmstepd", "slurm_script")


def ranks() -> list[int]:
    """The user's program on this node."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if not name.isdigit():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{name}/comm") as file:
                comm = file.read().strip()
        except OSError:
            continue
        marked = any(w.startswith(b"TRANSOM_EPOCH=") for w in words) and any(w.startswith(b"RANK=") for w in words)
        if marked and comm not in NOT_RANKS:
            found.append(int(name))
    return found


def daemon(path: str) -> list[int]:
    """The process that a pid file names."""
    try:
        with open(path) as file:
            return [int(file.read())]
    except (OSError, ValueError):
        return []


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main() -> None:
    """Stop and continue by turns; leave nothing stopped behind."""
    stopped, running, what = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    print(f"slows {what} from now on", flush=True)
    while not ended:
        pids = ranks() if what == "ranks" else daemon(what)
        send(pids, signal.SIGSTOP)
        time.sleep(stopped)
        send(pids, signal.SIGCONT)
        time.sleep(running)


if __name__ == "__main__":
    main()
