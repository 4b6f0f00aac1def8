"""A launch whose logs lie on a file system that died is watched all the same, and that it is seen less of is told."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from transomd.api.wire import LaunchOrder, LaunchReport
from transomd.launch.aside import Aside
from transomd.launch.awake import Awake
from transomd.launch.launcher import Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.program import SRUN_LOG
from transomd.launch.reading import Reading, Sighted
from transomd.launch.rundir import COMPLETED, RunDir
from transomd.launch.watch import LogWatch
from transomd.spec import JobSpec
from transomd.tee.detect import ProcessState
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


def reading_of(path: Path, clock: list[float], within_s: float = 0.05) -> tuple[DeadStore, Reading]:
    """A launch that began at 0, whose logs cannot be read before they are ``alive``."""
    sighted = Sighted(lambda: clock[0])
    progress = Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60)
    logs = DeadStore(path, SPEC, ("n1",), progress, sighted)
    logs.alive = threading.Event()
    return logs, Reading(logs, lambda: clock[0], sighted, within_s=within_s, final_s=within_s)


async def read(reading: Reading) -> None:
    while not await reading.poll():
        await asyncio.sleep(0.01)


async def go_blind(logs: DeadStore, reading: Reading) -> None:
    logs.alive.clear()
    assert not await reading.poll()


async def test_what_cannot_be_read_is_told_and_is_no_standing_still(tmp_path: Path, clock: list[float]) -> None:
    logs, reading = reading_of(tmp_path, clock)
    (tmp_path / "rank-00000.log").write_text("step 1\n")
    logs.alive.set()
    await read(reading)
    await go_blind(logs, reading)
    assert "its logs cannot be read since" in reading.trouble
    assert "the file system does not answer" in reading.trouble
    clock[0] = 1000.0
    assert reading.stalled() is None, "while nothing is seen"
    logs.alive.set()
    await read(reading)
    assert reading.trouble == ""
    assert reading.stalled() is None
    clock[0] = 1061.0
    assert reading.stalled() is not None


async def test_a_store_that_is_slow_now_and_then_hides_no_hang(tmp_path: Path, clock: list[float]) -> None:
    logs, reading = reading_of(tmp_path, clock)
    (tmp_path / "rank-00000.log").write_text("step 1\n")
    logs.alive.set()
    await read(reading)
    for _ in range(4):
        await go_blind(logs, reading)
        clock[0] += 10
        logs.alive.set()
        await read(reading)
        clock[0] += 20
        await read(reading)
    assert reading.stalled() is not None, "80 s were seen of 120"


async def test_what_is_asked_aside_fails_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLIMIT_NPROC and the pids of a cgroup count the program's threads, too: the launcher must not die of it."""
    disk = Aside(5.0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(OSError, match="nothing can be asked: can't start new thread"):
            await disk.ask(os.getpid)
    assert await disk.ask(os.getpid) == os.getpid()


async def test_a_log_folder_that_is_gone_is_not_taken_for_silence_of_the_program(tmp_path: Path) -> None:
    folder = tmp_path / "e1"
    folder.mkdir()
    logs, reading = reading_of(folder, [0.0], within_s=60.0)
    logs.alive.set()
    assert await reading.poll()
    shutil.rmtree(folder)
    assert not await reading.poll()
    assert "No such file" in reading.trouble


class Running:
    """A program that runs until it is ended."""

    def __init__(self, rc: int | None = None, logs: Path = Path("/")) -> None:
        self.rc, self.logs = rc, logs

    async def stop(self) -> None:
        self.rc = 143


def a_launcher(path: Path, host: str = "n1") -> Launcher:
    (path / "token").write_text("secret")
    options = Options(run_dir=RunDir(path), job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1",), host=host)
    link: Any = None
    return Launcher(options, link, SPEC, Watch())


async def test_a_lost_node_ends_a_launch_whose_logs_cannot_be_read(tmp_path: Path, clock: list[float]) -> None:
    launcher, program = a_launcher(tmp_path, host="n2"), Running()
    runs, course = launcher.runs, launcher.course
    course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    runs._program, runs._clock = program, Awake()  # type: ignore[assignment]
    logs, runs._reading = reading_of(tmp_path, clock)
    await runs.look()
    assert course.phase is LauncherPhase.FAILED
    assert course.failure is not None
    assert {"LOGS-UNREAD", "HEARTBEAT-LOST"} <= {e["signature"] for e in course.failure.evidence}
    assert program.rc == 143
    assert "its logs cannot be read" in launcher._report().message
    logs.alive.set()


async def ended(path: Path, clock: list[float]) -> tuple[Launcher, DeadStore]:
    """A launcher whose srun has ended with exit code 0, and which could not read the logs when it saw that."""
    launcher = a_launcher(path)
    launcher.course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    launcher.runs._program, launcher.runs._clock = Running(rc=0, logs=path), Awake()  # type: ignore[assignment]
    logs, launcher.runs._reading = reading_of(path, clock)
    await launcher.runs.look()
    assert launcher.course.running
    assert "exit code 0, which is not believed yet: its logs cannot be read" in launcher._report().message
    logs.alive.set()
    return launcher, logs


async def test_exit_code_0_is_believed_when_the_log_of_srun_could_be_read(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / SRUN_LOG).write_text("srun: error: _server_write write failed: Bad file descriptor\n")
    (tmp_path / "rank-00000.log").write_text("step 60\n")
    launcher, _ = await ended(tmp_path, clock)
    while launcher.course.running:
        await launcher.runs.look()
    assert (launcher.course.phase, launcher.course.exit_code) == (LauncherPhase.DONE, 0)
    assert launcher.course.newest.last_step == 60
    assert launcher.options.run_dir.claimed(COMPLETED)
    assert launcher._report().message == ""


async def test_exit_code_0_of_an_srun_that_did_not_wait_is_no_end_of_the_program(
    tmp_path: Path, clock: list[float]
) -> None:
    (tmp_path / SRUN_LOG).write_text("srun: error: Aborting, io error and missing step on node 0\n")
    launcher, _ = await ended(tmp_path, clock)
    while launcher.course.running:
        await launcher.runs.look()
    assert launcher.course.phase is LauncherPhase.FAILED
    assert not launcher.options.run_dir.claimed(COMPLETED)
    assert launcher.course.failure is not None
    assert [e["signature"] for e in launcher.course.failure.evidence if e["source"] == "slurm"] == ["SL-ABORT"]


async def test_ends_that_srun_told_before_it_ended_are_read_before_it_is_asked_who_is_stuck(
    tmp_path: Path, clock: list[float]
) -> None:
    """What such a rank has left behind is no stuck rank: the order tells."""
    launcher = a_launcher(tmp_path)
    runs, course = launcher.runs, launcher.course
    course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    runs._program, runs._bad_exit_at = Running(rc=1, logs=tmp_path), 1.0  # type: ignore[assignment]
    logs, runs._reading = reading_of(tmp_path, clock, within_s=60.0)
    logs.alive.set()
    runs._stuck = Mock(look=AsyncMock(return_value=[ProcessState(0, "n1", 4000, "D")]))
    (tmp_path / SRUN_LOG).write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    await runs.look()
    assert course.failure is not None
    at = {e["signature"]: e["at"] for e in course.failure.evidence}
    assert at["EXIT"] <= at["PROCESS-UNINTERRUPTIBLE"]


async def test_a_program_that_left_with_0_when_slurm_told_it_to_is_not_done(tmp_path: Path, clock: list[float]) -> None:
    """As when its job is preempted with a GraceTime: slurmctld tells every step, and no batch script."""
    told = "step 16\nslurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-30T19:49:09 ***\nsaved, leaving\n"
    (tmp_path / SRUN_LOG).touch()
    (tmp_path / "rank-00000.log").write_text(told)
    launcher, _ = await ended(tmp_path, clock)
    while launcher.course.running:
        await launcher.runs.look()
    assert launcher.course.phase is LauncherPhase.FAILED
    assert not launcher.options.run_dir.claimed(COMPLETED)
    assert "CANCELLED AT" in launcher._report().message


async def test_logs_that_were_removed_are_not_waited_for_when_the_program_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "e1"
    folder.mkdir()
    launcher = a_launcher(tmp_path)
    launcher.course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    launcher.runs._program, launcher.runs._clock = Running(rc=0, logs=folder), Awake()  # type: ignore[assignment]
    logs, launcher.runs._reading = reading_of(folder, [0.0], within_s=60.0)
    logs.alive.set()
    shutil.rmtree(folder)
    await launcher.runs.look()
    assert launcher.course.phase is LauncherPhase.FAILED
    assert not launcher.options.run_dir.claimed(COMPLETED)
    assert "its logs were removed" in launcher._report().message


async def test_what_ends_an_allocation_does_not_undo_the_end_of_the_program(tmp_path: Path) -> None:
    launcher = a_launcher(tmp_path)
    launcher.link = AsyncMock()
    launcher.course.complete(1.0)
    launcher.stop_by_signal("SIGTERM")
    assert await launcher._tick() == 0
    (report,) = launcher.link.report.call_args.args
    assert (report.phase, report.exit_code) == ("done", 0)


async def test_a_launch_that_comes_to_no_logs_is_not_told_by_those_of_the_one_before(
    tmp_path: Path, clock: list[float]
) -> None:
    launcher = a_launcher(tmp_path)
    logs, launcher.runs._reading = reading_of(tmp_path, clock)
    (tmp_path / "rank-00000.log").write_text("step 7\n")
    logs.alive.set()
    await read(launcher.runs._reading)
    assert await launcher.runs.launch(LaunchOrder(epoch=2, nodes=[]))
    assert launcher.course.phase is LauncherPhase.FAILED
    assert launcher.course.newest.last_step is None


async def test_a_run_folder_that_does_not_answer_starts_nothing_and_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, alive = a_launcher(tmp_path), threading.Event()
    launcher.claims._disk._within_s = 0.05

    def dead() -> list[int]:
        alive.wait(60)
        return []

    monkeypatch.setattr(launcher.options.run_dir, "epochs", dead)
    assert not await launcher.runs.launch(LaunchOrder(epoch=1, nodes=["n1"]))
    assert launcher.course.phase is LauncherPhase.GATE
    assert "epoch 1 cannot be claimed in the run folder: the file system does not answer" in launcher._report().message
    alive.set()
