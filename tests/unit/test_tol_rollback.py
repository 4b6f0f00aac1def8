"""A rollback resumes from an older checkpoint: each further back, never below what is kept, and it is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tol_launcher import SimLauncher
from tol_sites import started
from tol_world import SimWorld
from transom_sql.records import Incident, Launch

from transomd.api.views import job_json
from transomd.api.wire import LauncherReport, LaunchOrder
from transomd.launch.launcher import Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.rundir import RunDir
from transomd.spec import JobSpec, PolicySpec
from transomd.tee.types import Evidence, Verdict
from transomd.tol.policy import make_plan
from transomd.tol.rollback import Way, bound
from transomd.words import Action, Blame, Confidence, FailureClass, JobState, Role


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        made.save_every = 5
        yield made


def fails(launcher: SimLauncher, name: str, kind: FailureClass, blame: Blame, action: Action) -> None:
    said = Evidence(
        source="log",
        signature=name,
        text=name,
        role=Role.ROOT,
        failure_class=kind,
        blame=blame,
        action=action,
        at=launcher.world.now,
        node=launcher.nodes[len(launcher.launches) - 1],
        rank=len(launcher.launches) - 1,
    )
    launcher.fail("exit", name, [said])


def nan(launcher: SimLauncher) -> None:
    fails(launcher, "NUM-NAN", FailureClass.NUMERIC, Blame.UNKNOWN, Action.ROLLBACK)


def resumed(world: SimWorld) -> list[int | None]:
    return [launch.resume_step for launch in world.store.launches(1)]


async def test_each_rollback_goes_further_back_and_the_third_failure_ends_the_job(world: SimWorld) -> None:
    await world.submit()
    world.at_step(18, nan)
    await world.until(lambda: len(world.launched) == 2, "the first rollback")
    assert resumed(world)[:1] == [None]
    await world.until(lambda: "from step 10" in world.job().reason, "status says where from")
    assert job_json(world.view())["rollback_step"] == 10
    world.at_step(12, nan)
    await world.until(lambda: len(world.launched) == 3, "the second rollback")
    world.at_step(8, nan)
    assert await world.end() is JobState.FAILED, world.story()
    assert resumed(world) == [None, 10, 5]
    said = [event.message for event in world.events("rollback")]
    assert said[0] == "going back to the checkpoint of step 10, before that of step 15"
    assert said[1] == "going back to the checkpoint of step 5, before that of step 10"
    assert [i.action for i in world.incidents()] == ["rollback", "rollback", "stop"]


async def test_a_restart_after_a_rollback_does_not_return_to_what_was_left_behind(world: SimWorld) -> None:
    await world.submit()
    world.at_step(18, nan)
    await world.until(lambda: len(world.launched) == 2, "the rollback")
    world.at_step(11, lambda launcher: launcher.world.power_loss("n2"))
    await world.until(lambda: len(world.launched) == 3, "a node is lost before a newer checkpoint is there")
    world.at_step(16, lambda launcher: launcher.fail("exit", "who knows"))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert resumed(world) == [None, 10, 10, 15]
    assert bound(world.job().data) is None


async def test_a_daemon_that_is_started_anew_still_knows_how_far_back(world: SimWorld) -> None:
    await world.submit()
    world.at_step(18, nan)
    await world.until(lambda: world.events("rollback"), "the rollback is decided")
    await world.stop_daemon()
    await world.start_daemon()
    await world.until(lambda: len(world.launched) == 2, "the rollback")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert resumed(world) == [None, 10]


async def test_without_an_older_checkpoint_it_is_said_and_the_next_action_follows(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, nan)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert resumed(world) == [None, 5]
    (event,) = world.events("rollback")
    assert event.message == "no checkpoint before step 5 is known to go back to: restart instead"
    assert world.incidents()[0].action == "restart"


async def test_restarts_that_fail_from_one_checkpoint_lead_to_an_older_one(world: SimWorld) -> None:
    def dies(launcher: SimLauncher) -> None:
        if launcher.launches[-1].resume_step in (None, 15):
            launcher.world.at_step(16, dies)
            fails(launcher, "LOST", FailureClass.UNKNOWN, Blame.UNKNOWN, Action.RESTART)

    await world.submit()
    world.at_step(16, dies)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert resumed(world) == [None, 15, 15, 10]
    assert "2 launches from there came to no newer checkpoint" in world.events("rollback")[0].message


def judged(kind: FailureClass, blame: Blame, action: Action = Action.RESTART) -> Verdict:
    return Verdict(failure_class=kind, blame=blame, action=action, confidence=Confidence.LOW, summary="So it was.")


def test_a_fault_of_the_cluster_is_no_checkpoints_fault() -> None:
    way = Way(source=10, older=5, tried=9)
    launches = [Launch(job_id=1, epoch=1, attempt=1, nodes=("n1",), started_at=1.0, ended_at=9.0, last_step=12)]
    for kind, blame in ((FailureClass.HOST, Blame.NODE), (FailureClass.PREEMPTION, Blame.EXTERNAL)):
        assert make_plan(judged(kind, blame), [], launches, PolicySpec(), way).resume_step is None
    assert make_plan(judged(FailureClass.UNKNOWN, Blame.UNKNOWN), [], launches, PolicySpec(), way).resume_step == 5
    later = PolicySpec(rollback_after=10)
    assert make_plan(judged(FailureClass.UNKNOWN, Blame.UNKNOWN), [], launches, later, way).resume_step is None


def test_a_damaged_checkpoint_is_not_waited_for() -> None:
    verdict = judged(FailureClass.STORAGE, Blame.UNKNOWN, Action.ROLLBACK)
    earlier: list[Incident] = []
    assert make_plan(verdict, earlier, [], PolicySpec(), Way(source=10, older=5)).action is Action.ROLLBACK
    assert make_plan(verdict, earlier, [], PolicySpec(), Way(source=10)).action is Action.WAIT


@pytest.mark.parametrize(("saved", "step"), [([[40, 1]], 30), ([[35, 2], [30, 1]], None)])
async def test_a_launcher_on_its_own_goes_no_further_than_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[list[int]], step: int | None
) -> None:
    (tmp_path / "token").write_text("secret")
    run_dir = RunDir(tmp_path)
    options = Options(run_dir=run_dir, job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1",), host="n1")
    spec = JobSpec(name="t", command="true", nodes=1, workdir="/", checkpoint={"dir": str(tmp_path / "ck")})
    link: Any = None
    launcher = Launcher(options, link, spec, Watch())
    assert await launcher.runs.claim_epoch(LaunchOrder(epoch=2, nodes=["n1"], resume_step=30)) == 2
    launcher.folder.listed = saved
    assert await launcher.deputy._newest() == (2, step)


@pytest.mark.parametrize("told", [[[1]], [[1, -1]], ["x"], [[1, 2]] * 65, [[1.5, 1]]])
def test_checkpoints_in_a_report_are_pairs_of_step_and_epoch(told: list[Any]) -> None:
    report = LauncherReport(job_id=1, attempt=1, slurm_job_id=7, generation=1, host="n1", phase="gate", at=1.0)
    data = report.to_json()
    assert LauncherReport.from_json({**data, "checkpoints": [[7, 2], [3, 1]]}).checkpoints == [[7, 2], [3, 1]]
    with pytest.raises(ValueError, match=r"checkpoints|step|epoch"):
        LauncherReport.from_json({**data, "checkpoints": told})
