"""Failures that Slurm does not notice, or takes for others, and faults that are no failure of the job at all."""

from __future__ import annotations

import time

import pytest
from jobs import OFTEN, Site, check_end, patient, with_settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@with_settings("probed-often", **OFTEN, heartbeat_timeout_s=30)
def test_what_hurts_no_job_is_left_alone(site: Site) -> None:
    """A tool that hangs, a counter, a slow node, a slow controller and a locked database end no launch."""
    job = site.submit(site.until)
    site.wait_step(job, 7)
    for node, kind in (("n2", "nvidia-smi-hang"), ("n3", "ecc"), ("n2", "slow:40")):
        site.sandbox.fail(node, kind)
    site.wait_step(job, 40)
    site.sandbox.fail("hub", "ctld-slow")
    site.sandbox.fail("hub", "db-locked")
    time.sleep(8)
    site.sandbox.heal("hub")
    site.goes_on(job)
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert detail["incidents"] == [], site.story()
    assert len(detail["launches"]) == 1
    late = site.submit("--steps 10", nodes=3, spares=1)
    ended = check_end(site, late, drained=set())
    assert "n3" not in ended["launches"][0]["nodes"], "a node with memory errors is left out at the gate"
    assert ended["incidents"][0]["class"] == "gpu-memory"


@patient
@pytest.mark.parametrize("nodes", [3, 1])
def test_stepd_of_the_program_killed(site: Site, nodes: int) -> None:
    """srun notices when the node registers again. With no other rank to kill, it then ends with exit code 0."""
    job = site.submit("--then 20", nodes=nodes)
    site.wait_step(job, 7)
    site.sandbox.fail(f"n{nodes}", "stepd-kill")
    site.sandbox.run(["scontrol", "reconfigure"])
    detail = check_end(site, job, drained=set())
    assert len(detail["launches"]) == 2, site.story()
    (incident,) = detail["incidents"]
    assert (incident["class"], incident["blame"]) == ("launcher", "unknown")
    assert "srun: error: " in incident["summary"]


@patient
def test_agents_that_are_ended_are_started_again_beside_the_program(site: Site) -> None:
    """As srun ends all of them where a node of their step was lost and comes back."""
    job = site.submit(site.until)
    site.wait_step(job, 7)
    steps = site.sandbox.run(["squeue", "--noheader", "--steps", "--format=%i %j"]).stdout.split("\n")
    (agents,) = [line.split()[0] for line in steps if line.endswith(" agents")]
    site.sandbox.run(["scancel", agents])
    (log,) = site.root.glob("work/.transom/*/logs/launcher*.log")
    site.wait(lambda: "no agents on n[1-4]; starting them again" in log.read_text(), "the agents are missed")
    site.goes_on(job)
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert (len(detail["launches"]), detail["incidents"]) == (1, []), site.story()


def test_stepd_of_the_batch_script_killed(site: Site) -> None:
    job = site.submit("--steps 60 --then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n1", "stepd-kill:batch")
    check_end(site, job, drained=set())
    site.wait(lambda: not site.sandbox.run(["squeue", "-h"]).stdout, "the allocation is given back")


@pytest.mark.parametrize(("node", "kind"), [("n2", "slurmd-stop"), ("n1", "munge-stop")])
def test_node_that_only_slurm_loses(site: Site, node: str, kind: str) -> None:
    """n1 is the launcher's, which lives on: from there srun can start nothing any more, so that another takes over."""
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail(node, kind)
    detail = check_end(site, job, drained={node})
    assert len(detail["launches"]) == 2
    assert node not in detail["launches"][-1]["nodes"]
    assert (detail["incidents"][0]["class"], detail["incidents"][0]["nodes"]) == ("host", [node])
