"""Whole lives of jobs in virtual time: every failure to its right end, the right drains, nothing submitted twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tol_launcher import SimLauncher
from tol_sites import started
from tol_world import SimWorld, quick_settings
from transom_slurm.fake import SubmitFate
from transom_slurm.types import JobBase
from transom_sql.records import Intent

from transomd.api.views import job_json
from transomd.health.types import CheckResult, NodeReport
from transomd.tee.types import Evidence
from transomd.tol.attempts import EXCLUDE_FOR_S, next_attempt
from transomd.tol.decide import decide
from transomd.words import Action, Blame, FailureClass, JobState, LauncherPhase, Outcome, Role


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        yield made


def exception_on(ranks: int, nodes: list[str]) -> list[Evidence]:
    """The same traceback, printed by every rank."""
    return [
        Evidence(
            source="log",
            signature="PY-EXCEPTION",
            text="ValueError: shape mismatch: (3, 4) and (5,)",
            role=Role.ROOT,
            failure_class=FailureClass.USER_CODE,
            blame=Blame.PROGRAM,
            action=Action.STOP,
            at=1_800_000_000.0,
            node=nodes[rank],
            rank=rank,
        )
        for rank in range(ranks)
    ]


async def test_a_job_runs_to_its_end(world: SimWorld) -> None:
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [nodes for _, _, nodes in world.launched] == [("n1", "n2", "n3")]
    assert world.job().data["step"] == 30
    assert world.drained() == []


async def test_a_job_that_slurm_holds_until_a_person_lets_it_go_is_held(world: SimWorld) -> None:
    await world.submit({"sbatch": ["--hold"]})
    await world.until(lambda: world.state() is JobState.HELD, "the job is held", 60)
    assert world.job().reason == "Slurm holds job 1 (JobHeldUser) until a person lets it go: scontrol release 1"
    await world.run(2000)
    assert world.state() is JobState.HELD
    assert len(world.events("held")) == 1
    world.slurm.start(1)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.incidents() == []


async def test_a_job_that_no_waiting_starts_is_held_and_says_what_to_do(world: SimWorld) -> None:
    await world.submit({"nodes": 40})
    await world.until(lambda: world.state() is JobState.HELD, "the job is held", 60)
    assert world.job().reason.startswith("Slurm cannot start job 1 (PartitionConfig): it asks for nodes, time")
    assert "See: scontrol show partition main; then: transom cancel 1, and submit again" in world.job().reason
    await world.run(600)
    assert len(world.events("held")) == 1


async def test_a_held_job_can_be_cancelled(world: SimWorld) -> None:
    await world.submit({"sbatch": ["--hold"]})
    await world.until(lambda: world.state() is JobState.HELD, "the job is held", 60)
    assert world.operator is not None
    await world.operator.cancel(1, "alice")
    assert await world.end() is JobState.CANCELLED, world.story()


# --- nodes ------------------------------------------------------------------------------------------------------------


async def test_a_lost_node_is_replaced_by_the_spare_and_drained_once_slurm_says_down(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n2"))
    await world.until(lambda: len(world.launched) == 2, "the second launch", 60)
    assert world.drained() == []
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.until(world.drained, "n2 is drained", 100)
    await world.run(60)
    assert world.drained() == ["n2"]
    assert world.launched[-1] == (1, 2, ("n1", "n3", "n4"))
    (incident,) = world.incidents()
    assert (incident.failure_class, incident.nodes) == ("host", ("n2",))
    assert incident.recovered_at is not None
    assert incident.drained_at is not None
    assert len(world.slurm.accepted) == 1


async def test_a_node_that_somebody_has_seen_to_is_left_out_no_more() -> None:
    world = SimWorld(8)
    await world.start_daemon()
    await world.submit({"nodes": 3, "spares": 0})
    world.at_step(8, lambda _: world.power_loss("n2"))
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.until(world.drained, "n2 is drained", 100)
    assert world.operator is not None

    def left_out() -> tuple[str, ...]:
        assert world.operator is not None
        return next_attempt(world.view(), world.operator.world(), world.now).excluded

    assert left_out() == ("n2",)
    world.slurm.resume_by_person("n2")
    await world.run(5)
    assert left_out() == ()
    await world.close()


async def test_a_node_is_left_out_for_a_day_and_never_so_many_that_too_few_are_left() -> None:
    world = SimWorld(4)
    await world.start_daemon()
    await world.submit({"nodes": 3, "spares": 0})
    world.at_step(8, lambda _: world.power_loss("n2"))
    assert await world.end() is JobState.COMPLETED, world.story()
    world.slurm.heal_node("n2")
    world.slurm.resume_by_person("n2")
    await world.run(5)
    assert world.operator is not None
    seen, view, later = world.operator.world(), world.view(), world.now + 60
    undone = replace(view, intents={})  # as where nothing was drained: no drain that was lifted tells that it is well
    assert next_attempt(undone, seen, later).excluded == ("n2",)
    assert next_attempt(undone, seen, later + EXCLUDE_FOR_S).excluded == ()
    world.slurm.drain_by_person("n3", "rack move")
    await world.run(5)
    assert next_attempt(undone, world.operator.world(), later).excluded == (), "three are wanted, and three are left"
    await world.close()


async def test_a_site_that_observes_drains_nothing() -> None:
    world = SimWorld(settings=quick_settings(drain={"node_loss": "observe"}, health={"modes": {}}))
    await world.start_daemon()
    world.unfit["n3"] = ["xid"]
    await world.submit({"nodes": 2, "spares": 2})
    world.at_step(8, lambda _: world.power_loss("n2"))
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(120)
    assert world.drained() == []
    assert [nodes for _, _, nodes in world.launched] == [("n1", "n2"), ("n1", "n4")]
    await world.close()


async def test_the_batch_host_is_lost_and_another_launcher_takes_over(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n1"))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n2", "n3", "n4")
    assert [x.generation for x in world.launchers] == [1, 2]
    await world.until(world.drained, "n1 is drained", 100)
    assert world.drained() == ["n1"]
    # Nothing but scancel ends an allocation whose batch script died with its node.
    assert all(job.ended for job in world.slurm.all_jobs().values())
    assert len(world.slurm.accepted) == 1


async def test_a_node_and_the_batch_host_at_once() -> None:
    world = SimWorld(6)
    await world.start_daemon()
    await world.submit({"spares": 2})
    world.at_step(8, lambda _: [world.power_loss("n1"), world.power_loss("n3")])
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n2", "n4", "n5")
    await world.until(lambda: len(world.drained()) == 2, "two nodes are drained", 100)
    assert sorted(world.drained()) == ["n1", "n3"]
    world.check()
    await world.close()


async def test_two_nodes_at_once(world: SimWorld) -> None:
    await world.submit({"nodes": 3, "spares": 2})
    world.at_step(8, lambda _: [world.power_loss("n2"), world.power_loss("n3")])
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n4", "n5")
    await world.until(lambda: len(world.drained()) == 2, "two nodes are drained", 100)
    assert sorted(world.drained()) == ["n2", "n3"]


async def test_most_nodes_at_once_are_the_networks_fault_and_nobody_is_drained() -> None:
    world = SimWorld(8)
    await world.start_daemon()
    await world.submit({"nodes": 4, "spares": 0})
    world.at_step(8, lambda _: [world.cable_cut(n) for n in ("n2", "n3", "n4")])
    await world.until(lambda: world.incidents() and world.incidents()[0].diagnosed_at, "a verdict")
    assert world.incidents()[0].blame == "network"
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(60)
    assert world.drained() == []
    world.check()
    await world.close()


async def test_three_nodes_of_many_are_left_out_and_not_drained() -> None:
    """They share a switch, a rack or a power line; who knows which node of them is at fault?"""
    world = SimWorld(16, settings=quick_settings(drain={"per_incident": 9, "per_hour": 9, "max_fraction": 1.0}))
    await world.start_daemon()
    await world.submit({"nodes": 8, "spares": 3})
    world.at_step(8, lambda _: [world.power_loss(n) for n in ("n2", "n3", "n4")])
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(60)
    assert world.launched[-1][2] == ("n1", "n5", "n6", "n7", "n8", "n9", "n10", "n11")
    assert world.drained() == []
    world.check()
    await world.close()


async def test_too_few_nodes_are_left_so_a_new_attempt_goes_without_the_lost_one(world: SimWorld) -> None:
    await world.submit({"spares": 0})
    world.at_step(8, lambda _: world.power_loss("n2"))
    assert await world.end() is JobState.COMPLETED, world.story()
    first, second = world.store.attempts(1)
    assert (first.barred, second.excluded) == (("n2",), ("n2",))
    assert "n2" not in world.launched[-1][2]
    assert len(world.slurm.accepted) == 2
    await world.until(world.drained, "n2 is drained", 100)


async def test_a_node_is_lost_while_recovering(world: SimWorld) -> None:
    await world.submit({"nodes": 3, "spares": 2})
    world.at_step(8, lambda _: world.power_loss("n2"))
    await world.until(lambda: world.state() is JobState.RECOVERING)
    world.power_loss("n3")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n4", "n5")
    await world.until(lambda: len(world.drained()) == 2, "two nodes are drained", 100)


async def test_the_new_launch_fails_as_well(world: SimWorld) -> None:
    await world.submit({"nodes": 3, "spares": 2})
    world.at_step(8, lambda _: world.power_loss("n2"))
    await world.until(lambda: len(world.launched) == 2)
    world.power_loss("n4")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n3", "n5")
    assert [i.nodes for i in world.incidents()] == [("n2",), ("n4",)]


async def test_an_unfit_node_is_replaced_at_the_gate(world: SimWorld) -> None:
    world.unfit["n2"] = ["gpu-count"]
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [nodes for _, _, nodes in world.launched] == [("n1", "n3", "n4")]
    assert world.drained() == ["n2"]
    assert world.incidents()[0].failure_class == "gpu-hardware"


async def test_a_check_that_fails_nearly_everywhere_drains_nobody() -> None:
    world = SimWorld(8, settings=quick_settings(drain={"max_fraction": 1.0, "per_incident": 9, "per_hour": 9}))
    await world.start_daemon()
    for node in ("n1", "n2", "n3", "n4"):
        world.unfit[node] = ["xid"]
    await world.submit({"nodes": 4, "spares": 0})
    assert await world.end() is JobState.COMPLETED, world.story()
    assert set(world.launched[-1][2]) == {"n5", "n6", "n7", "n8"}
    assert world.drained() == []
    world.check()
    await world.close()


async def test_what_the_probe_cannot_find_out_neither_bars_nor_drains(world: SimWorld) -> None:
    world.unprobed |= {"n1", "n2", "n3", "n4"}
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [nodes for _, _, nodes in world.launched] == [("n1", "n2", "n3")]
    assert world.drained() == []


async def test_an_xid_found_while_the_program_runs_ends_the_launch(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.unfit.update(n3=["xid"]))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n2", "n4")
    assert world.drained() == ["n3"]
    assert world.incidents()[0].failure_class == "gpu-hardware"


@pytest.mark.parametrize("mode", ["observe", "comment"])
async def test_an_xid_that_is_only_observed_ends_no_launch_and_is_told(mode: str) -> None:
    world = SimWorld(settings=quick_settings(health={"interval_s": 10.0, "modes": {"xid": mode}}))
    await world.start_daemon()
    world.steps = 60
    await world.submit()
    world.at_step(8, lambda _: world.unfit.update(n3=["xid"]))
    await world.until(lambda: "; n3: xid: " in world.job().reason, "it is said", 60)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert (len(world.launched), world.incidents(), world.drained()) == (1, [], []), world.story()
    await world.close()


async def test_what_keeps_a_launcher_from_seeing_its_program_is_told(world: SimWorld) -> None:
    world.steps = 60
    await world.submit()
    world.at_step(8, lambda x: setattr(x, "message", "its logs cannot be read since 03:00:00"))
    await world.until(lambda: world.job().reason.endswith("; its logs cannot be read since 03:00:00"), "told", 60)
    assert await world.end() is JobState.COMPLETED, world.story()


async def test_a_file_that_is_missing_on_one_node_of_a_job_that_has_run_stops_nothing(world: SimWorld) -> None:
    """Its mount may be gone there: the second time on that node, the job goes on without it."""
    await world.submit()
    gone = replace(exception_on(1, ["n2"])[0], signature="PY-NOFILE", text="FileNotFoundError: [Errno 2] /data/x")
    for step in (8, 16):
        world.at_step(step, lambda x: x.fail("exit", "exit 1", [replace(gone, at=world.now)]))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [i.action for i in world.incidents()] == ["restart", "exclude"], world.story()
    assert "n2" not in world.launched[-1][2]


async def test_a_driver_that_is_replaced_under_a_program_ends_no_launch(world: SimWorld) -> None:
    """As an unattended upgrade does on every node: only a new program could not start there."""
    world.steps = 60
    await world.submit()
    found = ["gpu-count:NVML-MISMATCH"]
    world.at_step(8, lambda _: world.unfit.update(dict.fromkeys(["n1", "n2", "n3", "n4"], found)))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert (len(world.launched), world.incidents()) == (1, []), world.story()


async def test_a_check_that_fails_on_most_nodes_of_a_program_that_runs_ends_no_launch(world: SimWorld) -> None:
    world.steps = 60
    await world.submit()
    world.at_step(8, lambda _: world.unfit.update({n: ["gpu-count"] for n in ("n1", "n2", "n3")}))
    await world.until(lambda: "speaks against the check" in world.job().reason, "it is said", 60)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert (len(world.launched), world.incidents(), world.drained()) == (1, [], []), world.story()


async def test_one_node_that_is_bad_waits_for_the_word_of_the_others_but_not_for_long(world: SimWorld) -> None:
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    assert world.operator is not None
    now, bad = world.now + 1, CheckResult(check="xid", outcome=Outcome.UNFIT)
    first = NodeReport(node="n1", at=now, reached=True, results=(bad,))
    seen = replace(world.operator.world(), health={**world.operator.world().health, "n1": first})
    patience = world.settings.health.probe_timeout_s
    assert decide(world.view(), seen, world.settings, now).wake_at == now + patience
    assert decide(world.view(), seen, world.settings, now + patience).state is JobState.RECOVERING
    well = {name: NodeReport(node=name, at=now, reached=True) for name in ("n2", "n3")}
    heard = replace(seen, health={**seen.health, **well})
    assert decide(world.view(), heard, world.settings, now).state is JobState.RECOVERING


async def test_a_job_that_slurm_suspends_is_let_be_and_given_its_time_when_it_goes_on(world: SimWorld) -> None:
    world.steps = 1000
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    world.slurm._jobs[1].base = JobBase.SUSPENDED
    world.launchers[0].deaf_until = world.now + 306
    await world.run(300)
    assert "Slurm job 1 is suspended" in world.job().reason
    world.slurm._jobs[1].base = JobBase.RUNNING
    await world.run(20)
    assert (world.state(), world.incidents()) == (JobState.RUNNING, []), world.story()
    assert "suspended" not in world.job().reason


async def test_a_spare_found_unfit_during_recovery_is_not_used(world: SimWorld) -> None:
    await world.submit({"nodes": 3, "spares": 2})

    def act(_: SimLauncher) -> None:
        world.power_loss("n2")
        world.unfit["n4"] = ["gpu-count"]

    world.at_step(8, act)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n3", "n5")
    await world.until(lambda: len(world.drained()) == 2, "two nodes are drained", 100)


async def test_ranks_that_live_on_where_slurmd_died_are_ended_before_the_next_launch(world: SimWorld) -> None:
    """Slurm loses the node, the launcher's agent there is dead, SSH answers: fence it."""
    await world.submit()

    def act(launcher: SimLauncher) -> None:
        world.unheard.add("n2")
        world.slurm.fail_node("n2")

    world.at_step(8, act)
    await world.until(lambda: len(world.launched) == 2, "the second launch")
    assert world.processes["n2"] == set()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [i.state for i in world.store.intents(job_id=1) if i.kind == "fence"] == ["done"]


async def test_a_node_that_cannot_be_fenced_is_left_out(world: SimWorld) -> None:
    await world.submit()
    world.unfenceable.add("n2")
    world.at_step(8, lambda launcher: launcher.fail("exit", "srun ended with exit code 1"))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n3", "n4")
    assert world.drained() == []


# --- the program ------------------------------------------------------------------------------------------------------


async def test_an_exception_on_all_ranks_stops_after_one_attempt(world: SimWorld) -> None:
    await world.submit({"spares": 0})
    nodes = ["n1", "n2", "n3"]
    world.at_step(8, lambda launcher: launcher.fail("exit", "srun: exit 1", exception_on(3, nodes)))
    assert await world.end() is JobState.FAILED
    assert "ValueError: shape mismatch" in world.job().reason
    assert "ValueError" in str(world.incidents()[0].evidence)
    assert (len(world.store.attempts(1)), len(world.launched), world.drained()) == (1, 1, [])
    assert all(job.ended for job in world.slurm.all_jobs().values())


async def test_a_user_error_may_be_tried_again_where_the_job_says_so(world: SimWorld) -> None:
    await world.submit({"policy": {"max_user_restarts": 1}})
    nodes = ["n1", "n2", "n3"]
    world.at_step(8, lambda launcher: launcher.fail("exit", "srun: exit 1", exception_on(3, nodes)))
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.launched) == 2


async def test_no_progress_stops_the_job(world: SimWorld) -> None:
    await world.submit({"policy": {"no_progress_limit": 3}})

    def fail(launcher: SimLauncher) -> None:
        world.runs[1].saved = 7
        world.at_step(8, fail)
        launcher.fail("exit", "srun ended with exit code 1")

    world.at_step(8, fail)
    assert await world.end() is JobState.FAILED, world.story()
    assert "3 launches in a row" in world.job().reason
    assert len(world.launched) == 4
    assert world.drained() == []


async def test_the_restart_budget_ends(world: SimWorld) -> None:
    await world.submit({"policy": {"max_restarts": 2}})
    for step in (5, 10, 15):
        world.at_step(step, lambda launcher: launcher.fail("exit", "srun ended with exit code 1"))
    assert await world.end() is JobState.FAILED
    assert "restart budget is used up: 2 of 2" in world.job().reason
    assert len(world.launched) == 3


async def test_faults_of_nodes_do_not_use_up_the_budget_for_user_errors() -> None:
    world = SimWorld(8)
    await world.start_daemon()
    await world.submit({"nodes": 3, "spares": 3, "policy": {"max_user_restarts": 1}})
    for step, node in ((5, "n1"), (10, "n2")):
        world.at_step(step, lambda _, node=node: world.power_loss(node))  # type: ignore[misc]
    world.at_step(20, lambda x: x.fail("exit", "exit 1", exception_on(3, list(x.launches[-1].nodes))))
    assert await world.end() is JobState.COMPLETED, world.story()
    world.check()
    await world.close()


# --- people -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "gate", "running", "recovering"])
async def test_scancel_by_a_person_is_no_failure(world: SimWorld, when: str) -> None:
    await _come_to(world, when)
    world.slurm.cancel_by_person(1)
    assert await world.end() is JobState.CANCELLED, world.story()
    assert len(world.slurm.accepted) == 1
    assert world.drained() == []


@pytest.mark.parametrize("when", ["submitting", "queued", "gate", "running", "recovering", "between attempts"])
async def test_transom_cancel_in_every_state(world: SimWorld, when: str) -> None:
    await _come_to(world, when)
    assert world.operator is not None
    await world.operator.cancel(1, "alice")
    assert await world.end() is JobState.CANCELLED, world.story()
    assert "alice" in world.job().reason
    assert all(job.ended for job in world.slurm.all_jobs().values()), world.slurm.all_jobs()


async def _come_to(world: SimWorld, when: str) -> None:
    """Bring a job to a moment of its life."""
    if when == "submitting":
        world.slurm.outage(5)
        await world.submit()
        return
    if when == "queued":
        world.slurm.queue_delay_s = 30.0
        await world.submit()
        await world.run(10)
        assert world.state() is JobState.QUEUED
        return
    if when == "gate":
        world.unprobed |= {"n1"}
    if when == "recovering":
        world.at_step(8, lambda _: world.power_loss("n2"))
    if when == "between attempts":
        world.at_step(8, lambda _: [world.power_loss("n2"), world.slurm.outage(30, "submit")])
    await world.submit({"spares": 0 if when == "between attempts" else 1})
    ready: dict[str, Callable[[], object]] = {
        "gate": lambda: world.state() is JobState.CHECKING,
        "running": lambda: (world.job().data.get("step") or 0) > 3,
        "recovering": lambda: world.state() is JobState.RECOVERING,
        "between attempts": lambda: len(world.store.attempts(1)) == 2,
    }
    await world.until(ready[when], when)


async def test_a_node_that_a_person_drained_meanwhile_stays_as_it_is(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: [world.power_loss("n2"), world.slurm.drain_by_person("n2", "rack move")])
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(100)
    assert world.drained() == []
    node = (await world.slurm.nodes())["n2"]
    assert (node.reason, node.reason_user) == ("rack move", "alice")
    assert [e.node for e in world.events("drain-refused")] == ["n2"]


async def test_a_drain_that_a_person_edited_is_never_undone(world: SimWorld) -> None:
    world.unfit["n2"] = ["xid"]
    await world.submit()
    await world.until(world.drained, "n2 is drained")
    world.slurm.drain_by_person("n2", "transom[xid] and I looked at it")
    record = world.store.node("n2")
    assert record is not None
    assert world.operator is not None
    args = {"node": "n2", "reason": record.drain_reason, "user": record.drain_user, "time": record.drain_time}
    wanted = Intent(key="u1", kind="undrain", state="pending", created_at=world.now, args={**args, "who": "bob"})
    ended = await world.operator.act_now(wanted)
    assert ended.state == "failed"
    assert "no longer transom's" in ended.outcome["error"]
    assert world.calls("resume") == []


# --- Slurm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["node_fail", "timeout", "preempted"])
async def test_slurm_ends_the_job_and_a_new_attempt_follows(world: SimWorld, fate: str) -> None:
    limit = {"time_limit": "1"} if fate == "timeout" else {}
    world.steps = 80
    await world.submit(limit)
    if fate == "node_fail":
        await world.until(lambda: world.job().data.get("step", 0) > 5)
        world.slurm._jobs[1].no_kill = False
        world.slurm.set_down("n2", "Not responding", "slurm")
    elif fate == "preempted":
        await world.until(lambda: world.job().data.get("step", 0) > 5)
        world.slurm.preempt(1)
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.slurm.accepted) == 2
    classes = {"node_fail": "host", "timeout": "time-limit", "preempted": "preemption"}
    assert world.incidents()[0].failure_class == classes[fate], world.story()


async def test_a_failed_prolog_is_the_nodes_fault_and_no_persons_scancel(world: SimWorld) -> None:
    world.boot_s = 5.0
    await world.submit()
    await world.until(lambda: 1 in world.slurm.all_jobs() and world.slurm.all_jobs()[1].nodes)
    world.slurm.fail_launch(1, "n2")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.incidents()[0].nodes == ("n2",)
    assert "n2" not in world.launched[-1][2]
    assert world.drained() == []


async def test_a_failed_prolog_while_the_nodes_are_unknown_decides_nothing(world: SimWorld) -> None:
    world.boot_s = 5.0
    await world.submit()
    await world.until(lambda: 1 in world.slurm.all_jobs() and world.slurm.all_jobs()[1].nodes)
    world.slurm.fail_launch(1, "n2")
    world.slurm.outage(60, "nodes")
    await world.run(50)
    assert world.state() is JobState.QUEUED, world.story()
    assert await world.end() is JobState.COMPLETED, world.story()


@pytest.mark.parametrize("fate", [SubmitFate.ACCEPTED_UNSAID, SubmitFate.LOST])
async def test_a_submission_without_an_answer_is_looked_for_before_the_next_try(
    world: SimWorld, fate: SubmitFate
) -> None:
    world.slurm.next_submit(fate)
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.slurm.all_jobs()) == 1


async def test_a_refused_submission_fails_with_slurms_words(world: SimWorld) -> None:
    world.slurm.next_submit(SubmitFate.REJECTED)
    await world.submit()
    assert await world.end() is JobState.FAILED
    assert world.job().reason == "Slurm refused the job: scripted"


@pytest.mark.parametrize("when", ["queued", "gate", "running", "recovering"])
@pytest.mark.parametrize(("seconds", "cost"), [(60.0, 0.0), (60.0, 20.0), (600.0, 0.0)])
async def test_an_outage_changes_no_state_and_drains_nothing(
    world: SimWorld, when: str, seconds: float, cost: float
) -> None:
    world.steps = int(seconds) + 60
    await _come_to(world, when)
    before = world.state()
    world.hang(seconds, cost) if cost else world.slurm.outage(seconds)
    started, moved = world.now, []
    while world.now - started < seconds - 25:
        await world.tick()
        moved += [world.state()] if world.state() is not before else []
    # A gate opens, and a program runs on, without Slurm's word; nothing else may move.
    allowed = {"gate": {JobState.RUNNING}}.get(when, set())
    assert set(moved) <= allowed, world.story()
    assert world.drained() == []
    world.unprobed.clear()
    assert await world.end(within_s=2000) is JobState.COMPLETED, world.story()
    assert len(world.slurm.accepted) == 1
    assert set(world.drained()) <= ({"n2"} if when == "recovering" else set())


async def test_25_spaced_time_outs_do_nothing_to_a_running_job(world: SimWorld) -> None:
    world.steps = 600
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    for _ in range(25):
        world.hang(3, 1.5)
        await world.run(20)
        assert world.state() is JobState.RUNNING, world.story()
    assert (len(world.launched), world.incidents(), world.drained()) == (1, [], [])


async def test_a_job_that_slurm_forgot_is_tried_anew_only_after_a_while() -> None:
    world = SimWorld(accounting=False)
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    world.slurm.finish(1, 1)
    await world.run(400)
    await world.start_daemon()
    assert world.slurm.all_jobs() == {}
    await world.run(50)
    assert len(world.slurm.accepted) == 1
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.slurm.accepted) == 2
    world.check()
    await world.close()


async def test_a_job_that_was_done_and_forgotten_is_not_run_again() -> None:
    """Nobody heard the launcher's last word, and Slurm has forgotten the job: the run folder still knows."""
    world = SimWorld(accounting=False)
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    await world.run(600)
    assert world.slurm.all_jobs() == {}
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.launched) == 1
    world.check()
    await world.close()


async def test_where_a_job_was_is_known_though_nobody_heard_of_its_launches() -> None:
    world = SimWorld()
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: bool(world.slurm.accepted))
    await world.stop_daemon()
    await world.run(600)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.operator is not None
    view = world.operator.read(1)
    assert view is not None
    assert view.launches == ()
    assert job_json(view)["nodes"] == list(view.attempt.nodes) == ["n1", "n2", "n3", "n4"]
    assert view.attempt.started_at is not None
    await world.close()


async def test_accounting_tells_how_a_forgotten_job_ended() -> None:
    world = SimWorld()
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    world.slurm.cancel_by_person(1)
    await world.run(400)
    await world.start_daemon()
    assert await world.end() is JobState.CANCELLED, world.story()
    await world.close()


async def test_accounting_that_does_not_answer_makes_only_the_forgotten_job_unknown() -> None:
    world = SimWorld(8)
    await world.start_daemon()
    world.steps = 700
    await world.submit({"nodes": 2, "spares": 0})
    other = await world.submit({"name": "other", "nodes": 2, "spares": 0})
    await world.until(lambda: world.job(2).data.get("step", 0) > 3)
    await world.stop_daemon()
    world.slurm.cancel_by_person(1)
    await world.run(400)
    world.slurm.outage(120, "finished")
    await world.start_daemon()
    await world.run(110)
    assert not world.state(1).final, world.story()
    assert world.operator is not None
    assert world.operator.world().slurm.jobs is not None
    assert world.state(other) is JobState.RUNNING
    assert await world.end(1) is JobState.CANCELLED, world.story()
    await world.close()


async def test_a_job_that_slurm_lost_is_submitted_again_though_slurm_is_often_away(world: SimWorld) -> None:
    """Each outage is shorter than what makes its absence sure; together they must not put it off for ever."""
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    world.slurm.lose_newest_jobs()
    world.slurm_forgot = world.launchers[0].gone = True
    world.processes.clear()
    for _ in range(6):
        await world.run(15)
        world.slurm.outage(8)
    await world.until(lambda: len(world.slurm.accepted) == 2, "submitted again", 30)
    assert await world.end() is JobState.COMPLETED, world.story()


async def test_an_id_that_was_given_out_again_is_not_the_job() -> None:
    """slurmctld lost its newest state: our job's id now is a stranger's, while our processes run on."""
    world = SimWorld(10)
    await world.start_daemon()
    world.steps = 300
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    world.slurm.lose_newest_jobs()
    world.slurm_forgot = True
    stranger = await world.stranger()
    assert stranger == 1
    await world.run(100)
    assert world.state() is JobState.RUNNING, "it still reports"
    world.launchers[0].gone = True
    world.processes.clear()
    await world.until(lambda: len(world.slurm.accepted) == 3, "a new attempt")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert not world.slurm.all_jobs()[stranger].ended
    assert world.calls("cancel") == []
    await world.close()


# --- launchers --------------------------------------------------------------------------------------------------------


async def test_a_launcher_that_was_only_silent_is_a_false_alarm(world: SimWorld) -> None:
    """Its node answers Slurm and SSH: its program may be healthy, so it gets more time."""
    world.steps = 100
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    world.launchers[0].deaf_until = world.now + 40
    await world.until(lambda: world.state() is JobState.RECOVERING)
    await world.run(15)
    assert "is silent, but its node answers" in world.job().reason
    assert await world.end() is JobState.COMPLETED, world.story()
    assert (len(world.launched), len(world.launchers), world.drained()) == (1, 1, []), world.story()
    assert world.incidents()[0].data["false_alarm"] is True
    assert world.store.attempts(1)[0].barred == ()


async def test_a_replaced_launcher_that_comes_back_disturbs_nothing(world: SimWorld) -> None:
    world.steps = 100
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    world.unprobed |= {"n1"}
    world.launchers[0].deaf_until = world.now + 40
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [x.generation for x in world.launchers] == [1, 2]
    assert world.launchers[0].idle
    assert (len(world.launched), len(world.slurm.accepted), world.drained()) == (2, 1, [])


async def test_a_launcher_that_stays_silent_is_replaced_and_its_ranks_ended(world: SimWorld) -> None:
    world.steps = 100
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    world.launchers[0].deaf_until = world.now + 1e6
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [x.generation for x in world.launchers] == [1, 2]
    assert world.drained() == []


async def test_when_most_launchers_are_silent_it_is_the_daemon_that_does_not_hear() -> None:
    world = SimWorld(12)
    await world.start_daemon()
    world.steps = 400
    for number in range(4):
        await world.submit({"name": f"job{number}", "nodes": 2, "spares": 1})
    await world.until(lambda: all(world.state(n) is JobState.RUNNING for n in (1, 2, 3, 4)))
    for launcher in world.launchers:
        launcher.deaf_until = world.now + 200
    await world.run(220)
    assert len(world.launchers) == 4, world.story()
    for number in (1, 2, 3, 4):
        assert await world.end(number) is JobState.COMPLETED, world.story()
        assert len(world.store.launches(number)) == 1
    await world.close()


async def test_a_launcher_that_does_not_start_what_it_was_told_costs_the_attempt(world: SimWorld) -> None:
    world.boot_s = 2.0
    await world.submit()
    await world.until(lambda: world.launchers)
    world.launchers[0].obedient = False
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.slurm.accepted) == 2


async def test_no_launcher_reports_and_a_second_one_is_started(world: SimWorld) -> None:
    world.boot_s = 1000.0
    await world.submit()
    await world.until(lambda: world.launchers)
    world.boot_s = 1.0
    world.launchers[0].gone = True
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [x.generation for x in world.launchers] == [1, 2]


async def test_a_restart_on_the_grant_while_the_daemon_was_away_is_adopted(world: SimWorld) -> None:
    world.steps = 60
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.run(3)
    await world.stop_daemon()
    world.power_loss("n2")
    await world.until(lambda: len(world.launched) == 2, "the launcher restarts alone", 60)
    await world.run(5)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert [epoch for _, epoch, _ in world.launched] == [1, 2]
    assert [x.epoch for x in world.store.launches(1)] == [1, 2]
    assert world.job().epoch == 2


@pytest.mark.parametrize("back_after", [6, 200])
async def test_a_failure_while_the_daemon_was_away_has_its_incident(world: SimWorld, back_after: float) -> None:
    """Also when the program is done before anybody hears of it; and the lost node is drained."""
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    world.power_loss("n2")
    await world.until(lambda: len(world.launched) == 2, "the launcher restarts alone", 60)
    if back_after > 100:
        await world.until(lambda: world.runs[1].ended, "the program is done")
    else:
        await world.run(back_after)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    (incident,) = world.incidents()
    assert (incident.epoch, incident.nodes, incident.failure_class) == (1, ("n2",), "host")
    assert incident.recovered_at is not None
    assert [e["signature"] for e in incident.evidence] == ["HEARTBEAT-LOST"]
    await world.until(lambda: world.drained() == ["n2"], "n2 is drained", 60)


async def test_the_gate_opens_without_the_daemon(world: SimWorld) -> None:
    world.slurm.queue_delay_s = 5.0
    await world.submit()
    await world.until(lambda: world.state() is JobState.QUEUED)
    await world.stop_daemon()
    await world.until(lambda: world.launched, "the gate opens", 60)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.launched) == 1
    assert [a.nodes for a in world.store.attempts(1)] == [("n1", "n2", "n3", "n4")]


async def test_the_program_ends_while_the_daemon_is_away(world: SimWorld) -> None:
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    await world.until(lambda: all(job.ended for job in world.slurm.all_jobs().values()), "the launcher leaves", 200)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.launched) == 1


async def test_a_duplicate_is_turned_away_at_the_gate() -> None:
    """sbatch was taken twice: the one that is recorded starts, the other leaves without having started anything."""
    world = SimWorld(10)
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    assert world.operator is not None
    request = world.calls("submit")[0][0]
    twin = await world.slurm.submit(request)
    await world.run(5)
    assert world.slurm.all_jobs()[twin].ended
    told = await world.operator.report(_as(world, slurm_job_id=twin), "t" * 32)
    assert told.gate == "refuse"
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.launched) == 1
    await world.close()


def _as(world: SimWorld, **changes: int) -> object:

    return replace(world.launchers[0].report(), **changes)


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"per_hour": 1}, 1), ({"per_incident": 1}, 1), ({"max_fraction": 0.2}, 1), ({"enabled": False}, 0), ({}, 2)],
)
async def test_budgets_bound_what_is_drained_and_nothing_else(limits: dict[str, object], most: int) -> None:
    world = SimWorld(6, settings=quick_settings(drain=limits))
    await world.start_daemon()
    await world.submit({"nodes": 3, "spares": 2})
    world.at_step(8, lambda _: [world.power_loss("n2"), world.power_loss("n3")])
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(100)
    assert len(world.drained()) == most, world.story()
    assert len({e.node for e in world.events("drain-refused")}) == 2 - most
    world.check()
    await world.close()


async def test_the_kill_switch_is_read_live(tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    world = SimWorld(settings=quick_settings(drain={"kill_switch": str(switch)}))
    await world.start_daemon()
    switch.touch()
    world.unfit["n2"] = ["xid"]
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.drained() == []
    switch.unlink()
    await world.until(world.drained, "n2 is drained", 10)
    await world.close()


async def test_a_suspended_daemon_takes_its_own_absence_for_nobodys_silence(world: SimWorld) -> None:
    """The machine stood still for five minutes: no launcher was silent in that time."""
    world.steps = 1000
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    operator, world.operator = world.operator, None
    await world.run(300)
    world.operator = operator
    await world.run(30)
    assert world.state() is JobState.RUNNING, world.story()
    assert world.incidents() == []
    assert world.launchers[0].phase is LauncherPhase.RUNNING
