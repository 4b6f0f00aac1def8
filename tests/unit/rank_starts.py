"""Starts ranks of a program, time and again, from one process of it: importing torch takes longer than all they do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

WITHIN_S = 240.0


class Starts:
    """``starts("load", 4, place, NODES="...")`` runs so many ranks; whoever has made it closes it.

    ``dcp_ranks.main`` is the other end. The process is begun by the first start, and each start has the environment of
    its moment, as if it were a process of its own.
    """

    def __init__(self, program: Path) -> None:
        self.program = program
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, what: str, count: int, place: Path, **environ: str) -> None:
        """Run the ranks; an AssertionError has what they said if one of them failed, or did not end within 240 s."""
        with tempfile.NamedTemporaryFile("r") as said:
            start = {"what": what, "world": count, "place": str(place), "said": said.name}
            code = self._ask({**start, "environ": {**os.environ, **environ}})
            assert code == "0", f"{code or 'no answer'}: {said.read()[-4000:]}"

    def close(self) -> None:
        """End the process, and what is left of its ranks."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None

    def _ask(self, start: dict[str, object]) -> str:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(self.program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(start) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], WITHIN_S)
        code = self.process.stdout.readline().strip() if ready else ""
        if not code:
            self.close()
        return code
