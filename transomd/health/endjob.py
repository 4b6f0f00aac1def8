#!/usr/bin/python3 -IS
# ruff: noqa: I002, UP006, UP031, UP035, UP045 (this file runs on a node's own Python, 3.6 and later)
"""End what is left of one job's programs on this node, and say what was ended and what could not be.

``python3 - REQUEST < endjob.py``, as root. REQUEST is a JSON object: ``name`` and ``value`` of the environment variable
that marks the job, ``epoch`` (programs of this or an older launch only; null for all), ``deadline`` in seconds.

A process is matched by its environment at the time it was started, exactly; its descendants too, unless they bear a
mark of their own that does not match. With an epoch, a process without ``TRANSOM_EPOCH`` is no program and is left
alone (launcher, agent). Everything gets SIGKILL at once, again and again until two looks in a row find nothing.
"""

import sys

if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]  # this file's own directory, or the current one: nothing is ever imported from there

import json
import os
import signal
import time
from typing import Any, Dict, List, Optional, Set

POLL = 0.02
LOOKS = 10


class Seen:
    """A process as /proc shows it at one moment."""

    def __init__(self, pid: int, parent: int, state: str, environment: Dict[str, str]) -> None:
        self.pid, self.parent, self.state, self.environment = pid, parent, state, environment


def look(pid: int) -> Optional[Seen]:
    """One process; None once it is gone. A zombie has no environment any more."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/%d/environ" % pid, "rb") as file:
            marks = file.read().decode("utf-8", "surrogateescape").split("\0")
    except OSError:
        return None
    environment = dict(mark.partition("=")[::2] for mark in marks if "=" in mark)
    return Seen(pid, int(fields[1]), fields[0].decode(), environment)


def everything() -> List[Seen]:
    """Every process but this one and its ancestors; looked for again until a look finds no new one."""
    own: Set[int] = set()
    pid = os.getpid()
    found: Dict[int, Optional[Seen]] = {}
    for _ in range(LOOKS):
        new = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in found]
        found.update((number, look(number)) for number in new)
        if not new:
            break
    while pid and pid not in own:
        own.add(pid)
        here = found.get(pid)
        pid = here.parent if here else 0
    return [seen for number, seen in sorted(found.items()) if seen is not None and number not in own]


def matches(environment: Dict[str, str], request: Dict[str, Any]) -> Optional[bool]:
    """Whether a process belongs to what is to end; None if it bears no mark."""
    if request["name"] not in environment:
        return None
    if environment[request["name"]] != request["value"]:
        return False
    if request["epoch"] is None:
        return True
    epoch = environment.get("TRANSOM_EPOCH", "")
    return epoch.isdigit() and int(epoch) <= request["epoch"]


def targets(request: Dict[str, Any]) -> List[Seen]:
    """Every live process that is to end."""
    seen = everything()
    chosen = {one.pid for one in seen if matches(one.environment, request)}
    grown = True
    while grown:
        more = {one.pid for one in seen if one.parent in chosen and matches(one.environment, request) is None}
        grown = not more <= chosen
        chosen |= more
    return [one for one in seen if one.pid in chosen and one.state not in "ZX"]


def kill(pid: int, request: Dict[str, Any]) -> None:
    """SIGKILL; through a descriptor where there is one, so that a reused number is never hit."""
    try:
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
            return
        handle = os.pidfd_open(pid)
        try:
            again = look(pid)
            if again is not None and matches(again.environment, request) is not False:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    except OSError:
        pass


def main(argv: List[str]) -> int:
    """Kill, verify, and print ``killed`` and ``remaining`` (process id and state: D waits in the kernel)."""
    request = json.loads(argv[1])
    end = time.monotonic() + request["deadline"]
    killed: Set[int] = set()
    left, quiet = targets(request), 0
    while quiet < 2 and time.monotonic() < end:
        fresh = {one.pid for one in left} - killed
        for one in left:
            kill(one.pid, request)
        killed |= fresh
        if not fresh:
            time.sleep(POLL)  # none was new: nothing can have been forked that a moment's wait would let get away
        quiet = 0 if left else quiet + 1
        left = targets(request)
    remaining = [{"pid": one.pid, "state": one.state} for one in left]
    gone = sorted(killed - {one.pid for one in left})
    sys.stdout.write(json.dumps({"killed": gone, "remaining": remaining}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
