"""A launcher works with its own allocation's agents only, and no dead file system holds it up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from transomd.api.wire import LaunchOrder
from transomd.launch.agent import Agent
from transomd.launch.aside import Aside
from transomd.launch.launcher import Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.program import LaunchPlan, program_env
from transomd.launch.rundir import COMPLETED, RunDir
from transomd.spec import JobSpec
from transomd.words import ExitCode, LauncherPhase


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "env.json").write_text("{}")
    return RunDir(tmp_path)


def launcher(run_dir: RunDir, nodes: tuple[str, ...] = ("n1", "n2"), watch: Watch | None = None) -> Launcher:
    options = Options(run_dir=run_dir, job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=nodes, host="n1")
    spec = JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint={"dir": str(run_dir.root / "ck")})
    link: Any = None
    return Launcher(options, link, spec, watch or Watch())


async def test_never_started_on_fewer_nodes_than_asked_for(run_dir: RunDir) -> None:
    """A node of an earlier allocation in an order must not leave a program with a smaller world."""
    made = launcher(run_dir)
    await made.runs.launch(LaunchOrder(epoch=3, nodes=["n1", "n9"]))
    assert made.course.phase is LauncherPhase.FAILED
    assert "are not 2 nodes of this launcher's" in made.course.message


async def test_agents_of_an_earlier_allocation_do_not_count(run_dir: RunDir) -> None:
    made = launcher(run_dir)
    made.agents.hub._heard = {"n1": time.monotonic(), "n9": time.monotonic()}
    assert made.agents.alive() == ["n1"]


@pytest.mark.parametrize("timeout_s", [2.0, 4.0, 15.0])
async def test_a_machine_that_stood_still_has_lost_no_agent(run_dir: RunDir, timeout_s: float) -> None:
    """However short their silence may be: the launcher stood still with them, and they get their time."""
    made = launcher(run_dir, watch=Watch(heartbeat_timeout_s=timeout_s))
    now = [made._awake()]
    made._awake._clock = lambda: now[0]
    made.agents.hub._heard = {"n1": made._awake()}
    now[0] += timeout_s + 0.5
    assert made.agents.alive() == ["n1"]
    for _ in range(20):
        now[0] += 0.9
        made._awake()
    assert made.agents.alive() == []


async def test_an_agent_ends_when_the_job_has_another_allocation(run_dir: RunDir, monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    run_dir.write_json(run_dir.root / "spec.json", {"checkpoint": {}})
    run_dir.write_json(run_dir.launcher_file, {"host": "127.0.0.1", "port": 1, "generation": 1, "slurm_job_id": 7})
    await asyncio.wait_for(Agent(run_dir, 1, "n1", 0.1).run(), 60)


async def test_an_agent_stays_for_its_own_allocation(run_dir: RunDir, monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_dir.write_json(run_dir.root / "spec.json", {"checkpoint": {}})
    where = {"host": "127.0.0.1", "port": 1, "generation": 2, "slurm_job_id": 7}
    run_dir.launcher_file.write_text(json.dumps(where))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(Agent(run_dir, 1, "n1", 0.1).run(), 0.5)


async def test_a_dead_file_system_is_given_up_and_asked_once_at_a_time() -> None:
    dead, calls = threading.Event(), []

    def hang() -> None:
        calls.append(1)
        dead.wait(30)

    aside = Aside(0.05)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await aside.ask(hang)
    assert len(calls) == 1
    dead.set()
    while True:
        try:
            assert await aside.ask(lambda: 5) == 5
            return
        except asyncio.TimeoutError:
            await asyncio.sleep(0.01)


async def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await Aside(1.0).ask(fail)


def test_a_program_that_has_ended_is_claimed_once(run_dir: RunDir) -> None:
    assert not run_dir.claimed(COMPLETED)
    run_dir.claim(COMPLETED, {"epoch": 1})
    assert run_dir.claimed(COMPLETED)


@pytest.mark.parametrize(("slurm_job_id", "generation"), [(7, 1), (8, 1)])
async def test_a_batch_script_that_slurm_starts_again_or_twice_starts_nothing(
    run_dir: RunDir, slurm_job_id: int, generation: int
) -> None:
    """A requeue behind our back, or a duplicate: it leaves with a code of its own, and no agent or program is begun."""
    assert launcher(run_dir).claims.begin()
    options = Options(
        run_dir=run_dir, job_id=1, attempt=1, generation=generation, slurm_job_id=slurm_job_id, nodes=("n1",), host="n2"
    )
    again = launcher(run_dir)
    made = Launcher(options, again.link, again.spec, Watch())
    assert await made.run() == ExitCode.GATE_REFUSED
    assert not run_dir.launcher_file.exists()


def test_the_program_is_told_its_job_and_attempt_by_transoms_own_count(run_dir: RunDir) -> None:
    """SLURM_RESTART_COUNT counts Slurm's requeues; a run keeps its id through attempts and launches."""
    plan = LaunchPlan(
        job_id=4,
        attempt=3,
        epoch=9,
        nodes=("n1", "n2"),
        resume_step=30,
        master_port=5000,
        spec=launcher(run_dir).spec,
        env={"TRANSOM_ATTEMPT": "mine"},
        left_out=(),
    )
    told = program_env(plan, {"SLURM_RESTART_COUNT": "7", "SLURM_JOB_ID": "12"})
    assert {
        key: told[key] for key in ("TRANSOM_JOB_ID", "TRANSOM_ATTEMPT", "TRANSOM_EPOCH", "TRANSOM_RESUME_STEP")
    } == {
        "TRANSOM_JOB_ID": "4",
        "TRANSOM_ATTEMPT": "3",
        "TRANSOM_EPOCH": "9",
        "TRANSOM_RESUME_STEP": "30",
    }
    assert "SLURM_RESTART_COUNT" not in told


class Ended:
    """An srun that came to its end, or (with None) one that runs."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode


@pytest.mark.parametrize(("code", "again"), [(1, True), (None, False)])
async def test_agents_are_started_again_when_slurm_did_not(
    run_dir: RunDir, monkeypatch: Any, code: int | None, again: bool
) -> None:
    made, started = launcher(run_dir), []
    made.agents._step = Ended(code)  # type: ignore[assignment]
    made.agents._started_at = time.monotonic() - 60

    async def start(nodes: list[str]) -> None:
        started.append(nodes)

    monkeypatch.setattr(made.agents, "start", start)
    made.agents.hub._heard = dict.fromkeys(("n1", "n2"), time.monotonic())
    made.agents.hub._lines = {"n1": Ended(None)}  # type: ignore[dict-item]
    await made.agents.again(())
    assert started == ([["n2"]] if again else [])
