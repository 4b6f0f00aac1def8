"""The sruns of a job's own script: each is run by this file, which notes how it ended, and the notes are read.

A script's exit code is that of its last line: ``srun train; echo done`` ends with 0 however ``train`` ended. Standard
library only: run by its path, in place of srun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

SRUNS_LOG = "sruns.log"
SCRIPT_LOG = "rank-00000.log"
"""That of the script, in the same folder."""
MAX_CALL = 200
"""Characters of a call that are told."""
MAX_FAILED = 1000
"""Failed ones that are kept, and later those made up for; a script may try again for ever."""
_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


@dataclass
class _Call:
    """``began``: at which note; ``log_from``, ``log_to``: how long the script's log was then, and at its end (bytes).

    ``alone``: no other ran beside it.
    """

    call: str
    began: int
    log_from: int
    alone: bool
    log_to: int = 0


class Sruns:
    """What the notes say. ``told``: the script ended one of them itself, so that what is said of ends is its doing."""

    def __init__(self) -> None:
        self.told = False
        self._open: dict[str, _Call] = {}
        self._failed: dict[int, tuple[str, _Call]] = {}
        self._made_up: deque[_Call] = deque(maxlen=MAX_FAILED)
        self._good = 0
        self._lines = 0

    @property
    def failed(self) -> str:
        """The first that failed or has not ended, where none that was begun later has ended well; else empty."""
        left = {one.began: f"{one.call} has not ended" for one in self._open.values()}
        left |= {at: how for at, (how, _) in self._failed.items()}
        return next((left[at] for at in sorted(left) if at > self._good), "")

    def made_up(self, at: int) -> bool:
        """Whether byte ``at`` of the script's log came while one ran alone that failed, and was made up for later."""
        return any(one.log_from <= at < one.log_to for one in self._made_up)

    def feed(self, text: str) -> None:
        """Take whole lines. They are the user's own: what cannot be read says nothing."""
        for line in text.splitlines():
            self._lines += 1
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._note(json.loads(line))

    def _note(self, note: dict[str, Any]) -> None:
        what, who = note["what"], str(note["id"])
        if what == "began":
            self._begin(who, note)
            return
        one = self._open.pop(who, None) or _Call("srun", 0, 0, alone=False)
        if what == "told":
            self.told = True
        elif note["code"] == 0:
            self._end_well(one)
        elif len(self._failed) < MAX_FAILED:
            one.log_to = int(note.get("log", 0))
            self._failed[self._lines] = f"{one.call} ended with exit code {int(note['code'])}", one

    def _begin(self, who: str, note: dict[str, Any]) -> None:
        for other in self._open.values():
            other.alone = False
        call, size = str(note["call"])[:MAX_CALL], int(note.get("log", 0))
        self._open[who] = _Call(call, self._lines, size, alone=not self._open)

    def _end_well(self, one: _Call) -> None:
        self._good = max(self._good, one.began)
        self._made_up += [failed for at, (_, failed) in self._failed.items() if at <= self._good and failed.alone]
        self._failed = {at: failed for at, failed in self._failed.items() if at > self._good}


class _Noted:
    """One srun."""

    def __init__(self, notes: str, call: list[str]) -> None:
        self._notes = notes
        self._log = os.path.join(os.path.dirname(notes), SCRIPT_LOG)
        self._call = call
        self._id = f"{os.uname().nodename}-{os.getpid()}"
        self._child: subprocess.Popen[bytes] | None = None
        self._told = 0

    def run(self) -> int:
        """Run it to its end; return its exit code, as ``subprocess`` gives it."""
        for number in (getattr(signal, name) for name in _PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's ``&`` leaves SIGINT
                signal.signal(number, self._pass_on)
        self._note("began", call=shlex.join(["srun", *self._call[1:]])[:MAX_CALL])
        try:
            self._child = subprocess.Popen(self._call)
            if self._told:  # before there was anybody to pass it on to
                self._child.send_signal(self._told)
            code = self._child.wait()
        except OSError as error:
            print(f"{self._call[0]}: {error.strerror}", file=sys.stderr)
            code = 127
        self._note("told" if self._told else "ended", code=code)
        return code

    def _pass_on(self, number: int, _: object) -> None:
        self._told = number
        if self._child is not None:
            self._child.send_signal(number)

    def _note(self, what: str, **more: object) -> None:
        line = json.dumps({"what": what, "id": self._id, "log": self._said(), **more}) + "\n"
        with contextlib.suppress(OSError):
            handle = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)

    def _said(self) -> int:
        try:
            return os.stat(self._log).st_size
        except OSError:
            return 0


def main(argv: list[str]) -> int:
    """Run ``argv[1:]`` and note in ``argv[0]`` how it ends, and how long the script's log is; end as it did."""
    code = _Noted(argv[0], argv[1:]).run()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
