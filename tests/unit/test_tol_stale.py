"""What was so once is no reason to act now: old probes, drains that a person has lifted, acts that waited for long."""

from __future__ import annotations

from tol_world import SimWorld, quick_settings


async def test_a_probe_from_before_the_failure_drains_no_node() -> None:
    world = SimWorld(settings=quick_settings(drain={"node_loss": "observe"}))
    await world.start_daemon()
    assert world._observer is not None
    world.unfit["n2"] = ["xid"]
    await world._observer.check(["n2"])
    world.unfit.clear()
    await world.submit({"health": {"probe": False, "collective": False}})
    world.at_step(8, lambda _: world.cable_cut("n2"))
    await world.end()
    assert [incident.nodes for incident in world.incidents()] == [("n2",)], world.story()
    assert world.drained() == [], world.story()
    await world.close()
