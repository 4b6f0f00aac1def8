"""First process of a sandbox's node (or of its hub): do the steps of a JSON file, then reap orphans for ever.

The file holds ``hostname``, ``pid`` and ``boot`` (paths to write), and ``steps``: each a list of arguments to run, or
``["wait-link", NAME]``. A step that fails is written to ``boot`` and ends the boot, not the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

LINK_DEADLINE_S = 20.0


def write(path: str, text: str) -> None:
    """Replace a file, so that a reader sees the old text or the new."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def wait_link(name: str) -> int:
    """0 once the network interface exists."""
    deadline = time.monotonic() + LINK_DEADLINE_S
    while name not in (link for _, link in socket.if_nameindex()):
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.005)
    return 0


def run(argv: list[str]) -> int:
    """The exit code of a command; 127 when it does not exist. Orphans that end meanwhile are left for ``reap``."""
    if argv[0] == "wait-link":
        return wait_link(argv[1])
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ)
    except FileNotFoundError:
        return 127
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def boot(steps: list[list[str]]) -> str:
    """Do the steps in order and say how it went."""
    for argv in steps:
        code = run(argv)
        if code:
            return f"failed: {' '.join(argv)}: exit {code}"
    return "ready"


def reap() -> None:
    """Wait for ended children, ours and adopted ones, for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    """Boot; the pid is the host's as long as /proc is still the host's."""
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    write(plan["boot"], "starting")
    write(plan["pid"], os.readlink("/proc/self"))
    socket.sethostname(plan["hostname"])
    write(plan["boot"], boot(plan["steps"]))
    reap()


if __name__ == "__main__":
    main()
