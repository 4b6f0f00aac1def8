"""What was so once is no reason to act now: old probes, drains that a person has lifted, acts that waited for long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tol_sites import hands, started
from tol_world import quick_settings
from transom_slurm.types import NodeStatus, SlurmNode
from transom_sql.records import Incident, Intent

from transomd.settings import Settings
from transomd.tol.act import Actor
from transomd.tol.admit import MANUAL, REMEMBERED_S
from transomd.tol.drains import CONFIRM_WITHIN_S, propose_drains
from transomd.tol.view import SlurmView, stay
from transomd.words import IntentState, JobState

NOW = 1_800_000_000.0


async def test_a_probe_from_before_the_failure_drains_no_node() -> None:
    async with started(settings=quick_settings(drain={"node_loss": "observe"})) as world:
        assert world._observer is not None
        world.unfit["n2"] = ["xid"]
        await world._observer.check(["n2"])
        world.unfit.clear()
        await world.submit({"health": {"probe": False, "collective": False}})
        world.at_step(8, lambda _: world.cable_cut("n2"))
        await world.end()
        assert [incident.nodes for incident in world.incidents()] == [("n2",)], world.story()
        assert world.drained() == [], world.story()


async def test_a_drain_that_a_person_lifts_is_not_made_again_for_what_was_found_before() -> None:
    async with started() as world:
        world.unfit["n2"] = ["xid"]
        await world.submit()
        await world.until(lambda: any(job.nodes for job in world.slurm.all_jobs().values()), "nodes are given")
        world.slurm.drain_by_person("n2", "a fan")
        await world.until(lambda: world.events("drain-refused"), "our own drain is refused")
        world.unfit.clear()
        world.slurm.resume_by_person("n2")
        await world.run(60)
        assert world.drained() == [], world.story()


def test_an_incident_confirms_no_drain_of_a_node_that_is_back_in_service_since() -> None:
    await_drain = {"n1": ["xid"], "n2": ["xid"]}
    incident = Incident(id=1, job_id=1, attempt=1, epoch=1, detected_at=NOW, diagnosed_at=NOW)
    waiting = replace(incident, data={"await_drain": await_drain})
    slurm = SlurmView(nodes={name: SlurmNode(name, NodeStatus("IDLE"), "IDLE") for name in ("n1", "n2")})
    site = quick_settings()
    found = propose_drains([waiting], slurm, site, NOW + 20, {"n1": NOW + 10, "n2": NOW - 10})
    assert [intent.args["node"] for intent in found] == ["n2"]


class Slurm:
    """One idle node, and every drain that was made of it."""

    def __init__(self) -> None:
        self.drains: list[str] = []

    async def nodes(self) -> dict[str, SlurmNode]:
        return {"n1": SlurmNode("n1", NodeStatus("IDLE"), "IDLE")}

    async def drain(self, node: str, reason: str) -> None:
        self.drains.append(reason)


def drain(check: str, age_s: float) -> Intent:
    args = {"node": "n1", "check": check, "reason": "transom[x] y"}
    return Intent(key=f"drain:n1:{check}", kind="drain", state="pending", created_at=NOW - age_s, args=args)


@pytest.mark.parametrize("check", ["gpu-count", MANUAL])
async def test_a_drain_that_could_not_be_done_for_long_is_given_up(check: str) -> None:
    """As after an outage of Slurm's over the night: the trouble of yesterday evening may have been seen to."""
    slurm: Any = Slurm()
    reach: Any = SimpleNamespace()
    actor = Actor(slurm, reach, Settings(), lambda: NOW)
    late = await actor.perform(drain(check, 2 * CONFIRM_WITHIN_S), None)
    assert (late.state, slurm.drains) == (IntentState.FAILED, [])
    assert late.data["error"] == "it was called for 30 min ago and could not be done since"
    await actor.perform(drain(check, 10), None)
    assert slurm.drains == ["transom[x] y"]


async def test_what_a_person_asks_for_under_the_kill_switch_is_refused_and_not_done_on_another_day(
    tmp_path: Path,
) -> None:
    switch = tmp_path / "off"
    switch.touch()
    slurm: Any = Slurm()
    site = quick_settings(drain={"kill_switch": str(switch)})
    reach: Any = SimpleNamespace()
    actor = Actor(slurm, reach, site, lambda: NOW)
    asked = await actor.perform(drain(MANUAL, 0), None)
    assert (asked.state, asked.data["error"]) == (IntentState.FAILED, f"the kill switch {switch} is set")
    assert (await actor.perform(drain("gpu-count", 0), None)).again_s is not None
    assert slurm.drains == []


async def test_drains_of_long_ago_are_asked_of_the_database_no_more() -> None:
    """Every refused proposal reads the drains of the week anew, in every cycle."""
    async with started() as world:
        world.unfit["n2"] = ["xid"]
        await world.submit()
        await world.until(world.drained, "n2 is drained")
        assert world.operator is not None
        desk = world.operator._drains
        assert len(await desk._history()) == 1
        desk._proposals(world.operator.world(), world.settings, world.now + REMEMBERED_S + 1)
        assert await desk._history() == []


async def test_the_time_that_the_database_took_is_given_back_to_the_launcher_of_the_very_job() -> None:
    async with started() as world:
        world.steps = 1000
        await world.submit()
        await world.until(lambda: world.state() is JobState.RUNNING)
        world.launchers[0].deaf_until = world.now + 100
        await world.run(8)
        operator = world.operator
        assert operator is not None
        given_back = operator.books._waited
        operator.books._waited = lambda took: given_back(60.0)
        silent = world.now - world.view().report_at
        await operator._docket._record(world.view(), stay(world.view(), "as slow as can be"), world.now)
        assert (silent > 4, world.view().report_at) == (True, world.now)


@pytest.mark.parametrize(("lasts_s", "drained"), [(5, []), (60, ["n2"])])
async def test_what_may_pass_by_itself_drains_a_node_only_when_it_is_found_twice(
    lasts_s: float, drained: list[str]
) -> None:
    """A mount that answers late once, or a process of the last job that is still ending, is no reason."""
    async with started(settings=quick_settings(health={"modes": {"mounts": "drain"}})) as world:
        world.steps = 100
        world.unfit["n2"] = ["mounts"]
        await world.submit()
        await world.until(lambda: world.incidents(), "n2 is left out")
        await world.run(lasts_s)
        world.unfit.clear()
        await world.run(60)
        assert world.drained() == drained, world.story()
        assert world.launched[0][2] == ("n1", "n3", "n4")


async def test_who_drains_by_hand_is_told_that_it_is_tried_again() -> None:
    """Else the node would be drained a moment after somebody was told that it was not."""
    async with started() as world:
        await world.run(5)
        world.slurm.outage(20, "drain")
        (told,) = await hands(world).drain(["n1"], "transom[manual] ann: fan", dry_run=False)
        assert (told["done"], told["message"].endswith("; tried again for 15 min")) == (False, True), told
        await world.run(60)
        assert world.drained() == ["n1"]
