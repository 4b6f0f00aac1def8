"""What the kernel said before a node was put back into service does not count against it again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tol_sites import hands, started
from tol_world import SimWorld, quick_settings
from transom_slurm.types import NodeStatus, SlurmNode
from transom_sql.records import NodeRecord

from transomd.health.checker import ProbeOptions
from transomd.tol import nodewatch
from transomd.tol.clearings import Clearings
from transomd.tol.nodewatch import NodeWatch
from transomd.tol.reach import Reach
from transomd.tol.view import SlurmView
from transomd.words import JobState


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        await made.run(5)
        yield made


def cleared(world: SimWorld, node: str) -> float | None:
    assert world.operator is not None
    record = world.store.node(node)
    told = record.data.get("cleared_at") if record else None
    assert world.operator.clearings.at.get(node) == told
    return told


async def test_undrain_clears_at_once(world: SimWorld) -> None:
    world.unfit["n2"] = ["xid"]
    await world.submit()
    await world.until(world.drained, "n2 is drained")
    assert cleared(world, "n2") is None
    (done,) = await hands(world).undrain(["n2"], "ann", dry_run=False)
    assert done["done"], done
    at = cleared(world, "n2")
    assert at == world.now
    await world.run(60)
    assert cleared(world, "n2") == at
    assert world.events("cleared") == [], "it was told as undrained"
    await world.end()


async def lost_and_drained(world: SimWorld) -> None:
    """Lose a node under a job: it is DOWN to Slurm, and drained for it."""
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    world.power_loss("n2")
    await world.until(world.drained, "n2 is drained")
    await world.run(60)
    assert (await world.slurm.nodes())["n2"].status.base == "DOWN"


async def test_undrain_brings_a_lost_node_back_that_is_down(world: SimWorld) -> None:
    await lost_and_drained(world)
    (planned,) = await hands(world).undrain(["n2"], "ann", dry_run=True)
    assert (planned["done"], planned["message"]) == (False, "would be resumed")
    assert planned["command"] == "scontrol update nodename=n2 state=resume"
    assert world.calls("resume") == []
    (done,) = await hands(world).undrain(["n2"], "ann", dry_run=False)
    assert done["done"], done
    await world.run(5)
    status = (await world.slurm.nodes())["n2"].status
    assert (status.base, status.drain) == ("IDLE", False)
    assert [i.state for i in world.store.intents(kinds=["undrain"])] == ["done"], "recorded like any act"


async def test_undrain_leaves_a_node_that_somebody_else_set_down(world: SimWorld) -> None:
    await lost_and_drained(world)
    world.slurm.drain_by_person("n2", "RMA 4711")
    (drained,) = await hands(world).undrain(["n2"], "ann", dry_run=False)
    assert "not by transom: RMA 4711" in drained["message"]
    world.slurm.set_down("n3", "power supply")
    (down,) = await hands(world).undrain(["n3"], "ann", dry_run=False)
    assert (down["done"], "was set DOWN by" in down["message"]) == (False, True)
    assert world.calls("resume") == []


async def test_a_persons_own_resume_clears_too_and_for_good(world: SimWorld) -> None:
    world.slurm.drain_by_person("n3", "swap GPU 2")
    await world.run(20)
    assert cleared(world, "n3") is None
    world.slurm.resume_by_person("n3")
    resumed = world.now
    await world.run(20)
    at = cleared(world, "n3")
    assert at is not None
    assert at >= resumed
    assert [event.node for event in world.events("cleared")] == ["n3"]
    await world.stop_daemon()
    await world.start_daemon()
    await world.run(20)
    assert cleared(world, "n3") == at
    assert len(world.events("cleared")) == 1


async def test_a_drain_of_ours_that_was_lifted_while_the_daemon_was_away(world: SimWorld) -> None:
    world.unfit["n2"] = ["xid"]
    await world.submit()
    await world.until(world.drained, "n2 is drained")
    await world.stop_daemon()
    world.slurm.resume_by_person("n2")
    await world.start_daemon()
    await world.run(20)
    assert cleared(world, "n2") is not None


def test_while_slurm_is_unknown_no_drain_is_gone() -> None:
    clearings = Clearings()
    drained = SlurmNode("n1", NodeStatus("IDLE", frozenset({"DRAIN"})), "IDLE+DRAIN")
    assert clearings.look(SlurmView(nodes={"n1": drained}, nodes_at=1.0)) == []
    assert clearings.look(SlurmView(error="timed out", nodes_at=1.0)) == []
    assert clearings.look(SlurmView(nodes={}, nodes_at=2.0)) == []
    fine = SlurmNode("n1", NodeStatus("IDLE"), "IDLE")
    assert clearings.look(SlurmView(nodes={"n1": fine}, nodes_at=3.0)) == ["n1"]
    assert clearings.look(SlurmView(nodes={"n1": fine}, nodes_at=3.0)) == ["n1"], "until it is noted"
    clearings.note("n1", 3.0)
    assert clearings.at == {"n1": 3.0}
    assert clearings.look(SlurmView(nodes={"n1": fine}, nodes_at=4.0)) == []


def test_a_record_without_a_drain_waits_for_none() -> None:
    clearings = Clearings()
    clearings.load([NodeRecord(name="n1", changed_at=1.0), NodeRecord(name="n2", changed_at=1.0, drain_reason="x")])
    fine = {name: SlurmNode(name, NodeStatus("IDLE"), "IDLE") for name in ("n1", "n2")}
    assert clearings.look(SlurmView(nodes=fine, nodes_at=3.0)) == []


async def test_every_probe_and_every_hook_is_judged_with_it(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.operator is not None
    asked: list[ProbeOptions] = []

    class Rights:
        async def probe(self, nodes: Any, profile: Any, options: ProbeOptions, told: Any) -> None:
            asked.append(options)

    rights: Any = Rights()
    reach = Reach(quick_settings(), rights, "http://x")
    reach.cleared_at = world.operator.clearings.at
    world.operator.clearings.note("n1", 77.0)
    await world.submit()
    await reach.probe(["n1"], world.view(), lambda report: None)
    await reach.check(["n1"], lambda report: None)
    assert [dict(options.cleared_at) for options in asked] == [{"n1": 77.0}] * 2
    judged: list[float] = []
    monkeypatch.setattr(nodewatch, "judge", lambda *a, cleared_at, **k: judged.append(cleared_at))
    watch = NodeWatch(world.operator, world.settings, world.slurm.clock)
    report: Any = type("Report", (), {"facts": {}, "not_run": ()})()
    watch._judge(report, SlurmNode("n1", NodeStatus("IDLE"), "IDLE"))
    assert judged == [77.0]
