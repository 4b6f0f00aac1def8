"""A launch whose logs lie on a file system that died is watched all the same, and that it is seen less of is told."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from transomd.api.wire import LaunchOrder, LaunchReport
from transomd.launch.awake import Awake
from transomd.launch.launcher import Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.reading import Reading
from transomd.launch.rundir import RunDir
from transomd.launch.watch import LogWatch
from transomd.spec import JobSpec
from transomd.tee.progress import DEFAULT_PATTERN, Progress
from transomd.words import LauncherPhase

SPEC = JobSpec(name="t", command="true", nodes=1, tasks_per_node=1, workdir="/")


class DeadStore(LogWatch):
    """Logs of which no look comes back until ``alive`` is set."""

    alive: threading.Event

    def poll(self, now: float, final: bool = False) -> None:
        self.alive.wait(60)
        super().poll(now, final)


@pytest.fixture
def clock() -> list[float]:
    """The seconds that a test says it is."""
    return [0.0]


def logs_of(path: Path, clock: list[float]) -> DeadStore:
    progress = Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60)
    made = DeadStore(path, SPEC, ("n1",), progress, lambda: clock[0])
    made.alive = threading.Event()
    return made


async def test_what_cannot_be_read_is_told_and_is_no_standing_still(tmp_path: Path, clock: list[float]) -> None:
    logs = logs_of(tmp_path, clock)
    reading = Reading(logs, lambda: clock[0], within_s=0.05)
    (tmp_path / "rank-00000.log").write_text("step 1\n")
    assert not await reading.poll()
    assert "its logs cannot be read since" in reading.trouble
    assert "the file system does not answer" in reading.trouble
    clock[0] = 1000.0
    logs.alive.set()
    while not await reading.poll():
        await asyncio.sleep(0.01)
    assert reading.trouble == ""
    assert reading.stalled() is None
    clock[0] = 1061.0
    assert reading.stalled() is not None


async def test_a_log_folder_that_is_gone_is_not_taken_for_silence_of_the_program(tmp_path: Path) -> None:
    folder = tmp_path / "e1"
    folder.mkdir()
    logs = LogWatch(folder, SPEC, ("n1",), Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60), lambda: 0.0)
    reading = Reading(logs, lambda: 0.0)
    assert await reading.poll()
    shutil.rmtree(folder)
    assert not await reading.poll()
    assert "No such file" in reading.trouble


class Running:
    """A program that runs until it is ended."""

    rc: int | None = None

    async def stop(self) -> None:
        self.rc = 143


async def test_a_lost_node_ends_a_launch_whose_logs_cannot_be_read(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / "token").write_text("secret")
    options = Options(
        run_dir=RunDir(tmp_path), job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1",), host="n2"
    )
    link: Any = None
    launcher, program = Launcher(options, link, SPEC, Watch()), Running()
    runs, course = launcher.runs, launcher.course
    course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    runs._program, runs._clock = program, Awake()  # type: ignore[assignment]
    logs = logs_of(tmp_path, clock)
    runs._reading = Reading(logs, lambda: clock[0], within_s=0.05, final_s=0.05)
    await runs.look()
    assert course.phase is LauncherPhase.FAILED
    assert course.failure is not None
    assert {"LOGS-UNREAD", "HEARTBEAT-LOST"} <= {e["signature"] for e in course.failure.evidence}
    assert program.rc == 143
    assert "its logs cannot be read" in launcher._report().message
    logs.alive.set()


async def test_a_run_folder_that_does_not_answer_starts_nothing_and_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret")
    options = Options(
        run_dir=RunDir(tmp_path), job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1",), host="n1"
    )
    link: Any = None
    launcher, alive = Launcher(options, link, SPEC, Watch()), threading.Event()
    launcher.runs._disk._within_s = 0.05

    def dead() -> list[int]:
        alive.wait(60)
        return []

    monkeypatch.setattr(options.run_dir, "epochs", dead)
    assert not await launcher.runs.launch(LaunchOrder(epoch=1, nodes=["n1"]))
    assert launcher.course.phase is LauncherPhase.GATE
    assert "epoch 1 cannot be claimed in the run folder: the file system does not answer" in launcher._report().message
    alive.set()
