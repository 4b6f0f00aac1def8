"""Signals to the processes of a sandbox."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transom_slurm.sandbox import processes
from transom_slurm.sandbox.errors import SandboxError

_BUSY = """
import threading

def turn():
    while True:
        pass

for _ in range(8):
    threading.Thread(target=turn).start()
print(flush=True)
"""


def _states(pid: int) -> set[str]:
    return {processes.state(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


def test_all_threads_stand_when_stop_returns() -> None:
    with subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            for _ in range(20):
                processes.stop([busy.pid])
                assert _states(busy.pid) == {"T"}
                busy.send_signal(signal.SIGCONT)
        finally:
            busy.kill()


def test_stop_skips_what_is_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    processes.stop([gone.pid])


def test_stop_says_what_does_not_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        monkeypatch.setattr(processes, "signal_each", lambda pids, number: None)
        try:
            with pytest.raises(SandboxError, match=rf"stop processes \[{sleeper.pid}\]: not obeyed within 0.1 s"):
                processes.stop([sleeper.pid], timeout_s=0.1)
        finally:
            sleeper.kill()
