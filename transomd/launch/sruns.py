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
from typing import Any

SRUNS_LOG = "sruns.log"
MAX_CALL = 200
"""Characters of a call that are told."""
MAX_FAILED = 1000
"""Failed ones that are kept; a script may try again for ever."""
_PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


class Sruns:
    """What the notes say. ``told``: the script ended one of them itself, so that what is said of ends is its doing."""

    def __init__(self) -> None:
        self.told = False
        self._open: dict[str, tuple[int, str]] = {}
        self._failed: dict[int, str] = {}
        self._good = 0
        self._lines = 0

    @property
    def failed(self) -> str:
        """The first that failed or has not ended, where none that was begun later has ended well; else empty."""
        left = {at: f"{call} has not ended" for at, call in self._open.values()} | self._failed
        return next((left[at] for at in sorted(left) if at > self._good), "")

    def feed(self, text: str) -> None:
        """Take whole lines. They are the user's own: what cannot be read says nothing."""
        for line in text.splitlines():
            self._lines += 1
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._note(json.loads(line))

    def _note(self, note: dict[str, Any]) -> None:
        what, who = note["what"], str(note["id"])
        if what == "began":
            self._open[who] = self._lines, str(note["call"])[:MAX_CALL]
            return
        began, call = self._open.pop(who, (0, "srun"))
        if what == "told":
            self.told = True
        elif note["code"] == 0:
            self._good = max(self._good, began)
            self._failed = {at: how for at, how in self._failed.items() if at > self._good}
        elif len(self._failed) < MAX_FAILED:
            self._failed[self._lines] = f"{call} ended with exit code {int(note['code'])}"


class _Noted:
    """One srun."""

    def __init__(self, notes: str, call: list[str]) -> None:
        self._notes = notes
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
        line = json.dumps({"what": what, "id": self._id, **more}) + "\n"
        with contextlib.suppress(OSError):
            handle = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)


def main(argv: list[str]) -> int:
    """Run ``argv[1:]`` and note in ``argv[0]`` how it ends; end as it did."""
    code = _Noted(argv[0], argv[1:]).run()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
