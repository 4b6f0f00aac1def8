"""`make demo`: it shows what it promises, and leaves nothing, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transom_slurm.sandbox import processes
from transom_slurm.sandbox.scripts import TAG

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
SMALL = ("--steps", "40", "--every", "13", "--step-time", "0.5")


class Demo:
    """One run of the demo in a temporary folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.json = folder / "summary.json"
        (folder / "t").mkdir()
        folder.chmod(0o755)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(DEMO), *SMALL, "--json", str(self.json), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(folder / "t")},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 180.0) -> None:
        self.wait(lambda: text in self.said(), f"it says {text!r}", timeout_s)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < end, f"not within {timeout_s} s: {what}\n{self.said()}"
            time.sleep(0.05)

    def end(self, timeout_s: float = 300.0) -> int:
        return self.process.wait(timeout_s)

    def processes(self, name: str = "") -> list[int]:
        """The processes of its sandbox; only those of one name, if given."""
        here = str(self.folder / "t")
        ours = [pid for pid in processes.every_pid() if processes.environment(pid).get(TAG, "").startswith(here)]
        return [pid for pid in ours if name in ("", processes.name(pid))]

    def left(self) -> list[str]:
        """Everything that is left of it: processes, mounts, files."""
        here = str(self.folder / "t")
        found = [f"process {pid}" for pid in self.processes()]
        found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if here in line]
        return found + [str(path) for path in (self.folder / "t").iterdir()]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, make_sandbox: object) -> Iterator[Callable[..., Demo]]:
    """Start a demo; whatever is left of it is ended. ``make_sandbox`` skips where no sandbox can run."""
    started: list[Demo] = []

    def make(*options: str) -> Demo:
        started.append(Demo(tmp_path_factory.mktemp("d"), *options))
        return started[-1]

    yield make
    for demo in started:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.end()


def test_the_demo_proves_what_it_promises_and_leaves_nothing(start: Callable[..., Demo]) -> None:
    demo = start()
    assert demo.end() == 0, demo.said()
    summary = json.loads(demo.json.read_text())
    assert summary["passed"], demo.said()
    assert summary["clean"]
    assert all(summary["checks"].values())
    assert (summary["proof"]["steps"], summary["proof"]["equal"]) == (40, 40)
    moments = summary["timeline_s"]
    order = [moments[name] for name in ("fault", "detected", "diagnosed", "restarted", "first step", "first new step")]
    assert order == sorted(order)
    assert moments["drained"] > moments["detected"]
    parts = [value for key, value in summary["goodput"].items() if key.endswith("_s") and key != "wall_s"]
    assert sum(parts) == pytest.approx(summary["goodput"]["wall_s"])
    assert 0 < summary["goodput"]["share"] < 1
    said = demo.said()
    for word in ("POWER CUT", "40 of 40 losses are equal, bit for bit", "transom status tinylm", "Cleaned up"):
        assert word in said
    assert "\x1b" not in said
    assert demo.left() == []


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("a private, real Slurm", signal.SIGTERM, 143),
        ("launch     epoch 1", signal.SIGINT, 130),
    ],
)
def test_a_signal_cleans_up_and_a_second_one_does_not_stop_that(
    start: Callable[..., Demo], moment: str, number: signal.Signals, code: int
) -> None:
    demo = start()
    demo.wait_for(moment)
    os.killpg(demo.process.pid, number)
    demo.wait_for("cleaning up")
    os.killpg(demo.process.pid, number)
    assert demo.end() == code, demo.said()
    assert "Cleaned up" in demo.said()
    assert "Traceback" not in demo.said()
    assert demo.left() == []
    assert json.loads(demo.json.read_text())["clean"]


def test_when_transomd_dies_it_says_so_keeps_the_logs_and_cleans_up(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.wait_for("submitted")
    daemons = demo.processes("transomd")
    assert len(daemons) == 1
    os.kill(daemons[0], signal.SIGKILL)
    assert demo.end() == 1, demo.said()
    said = demo.said()
    assert "transomd ended with exit code -9" in said
    kept = list((demo.folder / "t").iterdir())
    assert len(kept) == 1
    assert f"All logs are kept in {kept[0]}" in said
    assert (kept[0] / "transomd.log").stat().st_size > 0
    assert "Cleaned up" in said
    assert not json.loads(demo.json.read_text())["passed"]
