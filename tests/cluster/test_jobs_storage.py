"""A full disk and a dead mount under a job: its own node is left out, nobody is drained, no checkpoint is lost."""

from __future__ import annotations

import os
import signal
import sys

import leaving
import pytest
from jobs import Site, check_end, needs_fuse, patient
from transom_slurm.sandbox import targets

from transomd.tce.catalogue import list_checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@needs_fuse
def test_mount_that_does_not_answer(site: Site) -> None:
    """Rank 0 hangs in the kernel on n1, where the launcher runs, too; the second time n1 is left out."""
    job = site.submit("--then 20", more="watch: {first_step_after: 8}\n")
    site.wait_step(job, 7)
    site.sandbox.fail("n1", "mount-dead")
    detail = check_end(site, job, drained=set())
    assert detail["incidents"][0]["class"] == "nccl-hang"
    assert "n1" not in detail["launches"][-1]["nodes"]
    assert len(detail["launches"]) == 3
    assert {i["confidence"] for i in detail["incidents"]} == {"medium"}


@patient
def test_disk_full_on_one_node(site: Site) -> None:
    """The program dies of ENOSPC when it saves: storage, no node's fault; it goes on when there is space again."""
    job = site.submit("--then 20", more="policy: {max_restarts: 5}\n")
    site.wait_step(job, 7)
    site.sandbox.fail("n1", "disk-full")
    site.wait_event(job, "verdict")
    assert "transom" not in site.sandbox.run(["scontrol", "-o", "show", "nodes"]).stdout
    site.sandbox.heal("n1")
    detail = check_end(site, job, drained=set())
    assert [i["class"] for i in detail["incidents"]] == ["storage"]
    assert detail["incidents"][0]["blame"] != "node"
    assert len(detail["launches"]) == 2


KEEPER = "transomd.tce.keeper"
LEAVING = """\
name: leaving
command: {python} {program} {told}
nodes: 1
tasks_per_node: 1
health: {{collective: false}}
checkpoint: {{dir: ck}}
"""


def ended_with_a_full_disk(site: Site) -> tuple[int, str]:
    """Run a job whose program has ended with exit code 0, and whose last save its keeper alone has; and its node."""
    work = site.root / "work"
    work.mkdir()
    values = {"python": sys.executable, "program": leaving.__file__, "told": work / "go"}
    (work / "job.yaml").write_text(LEAVING.format(**values))
    job = int(site.cli("submit", "job.yaml", "--json")["job"]["id"])
    site.wait_step(job, 1, within_s=120)
    (node,) = site.detail(job)["launches"][-1]["nodes"]
    site.sandbox.fail(node, f"disk-full:{work / 'ck'}")
    (work / "go").touch()
    said = f"the program has ended; what it saved last is being stored by {node} (rank 0 on {node}: "
    site.wait(lambda: said in site.job(job)["reason"], "what is waited for", 60)
    assert site.job(job)["state"] == "running"
    return job, node


def check_stored(site: Site, job: int) -> int:
    """The job is completed, and storage has what it saved last; in how many launches."""
    done = site.wait_state(job, "completed")
    assert done["reason"] == "the program ended with exit code 0 at step 2"
    assert [found.step for found in list_checkpoints(site.root / "work" / "ck") if found.complete] == [2, 1]
    return len(site.detail(job)["launches"])


def test_a_job_is_done_only_when_its_last_checkpoint_is_in_storage(site: Site) -> None:
    job, node = ended_with_a_full_disk(site)
    site.sandbox.heal(node)
    assert check_stored(site, job) == 1


def test_a_keeper_that_is_lost_with_the_last_checkpoint(site: Site) -> None:
    """It is no good end of the program: that runs again, from the checkpoint before."""
    job, node = ended_with_a_full_disk(site)
    (keeper,) = (p for p in targets.node_pids(site.sandbox.spec, node) if KEEPER in targets.command_line(p))
    os.kill(keeper, signal.SIGKILL)
    site.wait_event(job, "failure")
    site.sandbox.heal(node)
    assert check_stored(site, job) == 2
