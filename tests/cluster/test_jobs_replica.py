"""A node is lost with all its memory: the job goes on from the copy that another node holds, to the bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import copied
import pytest
from jobs import Site, check_end

from transomd.tce.catalogue import list_checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

JOB = """\
name: copied
command: {python} {program}
nodes: 3
spares: {spares}
tasks_per_node: 1
health: {{collective: false}}
checkpoint: {{dir: ck, {checkpoint}}}
env: {{OMP_NUM_THREADS: '1'}}
watch: {{first_step_after: 150, stall_after: 60, heartbeat_timeout: 8}}
"""


def submitted(site: Site, spares: int, checkpoint: str = "storage_every: 10") -> int:
    """Submit the job, and wait until each node holds what another one has staged of step HELD."""
    work = site.root / "work"
    work.mkdir(exist_ok=True)
    told = {"python": sys.executable, "program": copied.__file__, "spares": spares, "checkpoint": checkpoint}
    (work / "job.yaml").write_text(JOB.format(**told))
    job = int(site.cli("submit", "job.yaml", "--json")["job"]["id"])
    site.wait_step(job, copied.HELD + 2, within_s=200)
    return job


def told(site: Site, epoch: int) -> dict[int, tuple[int, str]]:
    """From which step each rank went on, and where it was."""
    found = {}
    for log in site.root.glob(f"work/.transom/*/logs/e{epoch:06d}/rank-*.log"):
        match = re.search(r"went on from (\d+), (.*)", log.read_text())
        assert match, log.read_text()
        found[int(log.stem[-5:])] = int(match[1]), match[2]
    return found


def told_interval(site: Site, job: int) -> int:
    """One in how many steps goes to storage, as people are told, and why; 0: it is not told."""
    why = r"\(auto: a write takes \S+s, a step \S+s, and the job's MTTF is 2m00s\)"
    page = " ".join(site.cli("status", str(job)).split())
    found = re.search(rf"storage gets one in every (\d+) steps {why}", page)
    return int(found[1]) if found else 0


def intervals(site: Site) -> set[int]:
    """What the ranks of the first launch have chosen, as they say, with their measures."""
    logs = "".join(log.read_text() for log in site.root.glob("work/.transom/*/logs/e000001/rank-*.log"))
    why = r"in every (\d+) \(chosen by measure\): a write takes [\d.]+ s, a step [\d.]+ s, and the job's MTTF is 0.03 h"
    return {int(every) for every in re.findall(why, logs)}


def all_losses(site: Site, launch: str = "e*") -> dict[int, set[str]]:
    """What was printed as the loss of each step, by any rank of any launch, or of one."""
    found: dict[int, set[str]] = {}
    logs: list[Path] = list(site.root.glob(f"work/.transom/*/logs/{launch}/rank-*.log"))
    for step, loss in (m.groups() for log in logs for m in re.finditer(r"step (\d+) loss (\S+)\n", log.read_text())):
        found.setdefault(int(step), set()).add(loss)
    return found


def check_losses(site: Site) -> None:
    """No step was left out, and whoever did it, and however often, had the very loss of a run without failures."""
    found = all_losses(site)
    assert found == {step: {loss} for step, loss in copied.losses(3, max(found)).items()}


def test_power_loss_of_a_node_is_made_good_from_the_copy(site: Site) -> None:
    job = submitted(site, spares=1, checkpoint="storage_every: 1000, replica_every: 3")
    ring = {"n1": "n2", "n2": "n3", "n3": "n1"}
    site.wait(lambda: site.job(job)["copies"] == ring, "who holds whose copy")
    assert site.job(job)["copies_trouble"] == ""
    assert "(one in every 3 steps)" in " ".join(site.cli("status", str(job)).split())
    site.sandbox.fail("n2", "power")
    check_end(site, job, drained={"n2"})
    went_on = told(site, 2)
    assert {step for step, _ in went_on.values()} == {went_on[0][0]}
    assert went_on[0][0] >= copied.HELD
    assert went_on[0][0] % 3 == 0
    # n4 takes the place of n2, and has rank 1 from where its copy is; n1 and n3 keep their ranks, and what they staged.
    assert site.detail(job)["launches"][-1]["nodes"] == ["n1", "n4", "n3"]
    assert [where for _, (_, where) in sorted(went_on.items())] == [
        "memory",
        "the copy of another node's memory",
        "memory",
    ]
    check_losses(site)


def test_copies_that_are_slower_than_the_saves_are_of_one_step(site: Site) -> None:
    """Each is of 20 KB or so, and takes two seconds, in which five steps are saved; storage gets none."""
    job = submitted(site, spares=1, checkpoint="storage_every: 1000, replica_rate: 10K")
    site.wait_step(job, copied.HELD + 12)
    (launch,) = site.detail(job)["launches"]
    lost = launch["nodes"][1]
    site.sandbox.fail(lost, "power")
    check_end(site, job, drained={lost})
    went_on, newest = told(site, 2), max(all_losses(site, "e000001"))
    (step,) = {step for step, _ in went_on.values()}
    assert copied.HELD <= step < newest
    assert {rank: where for rank, (_, where) in went_on.items()} == {
        0: "memory",
        1: "the copy of another node's memory",
        2: "memory",
    }
    check_losses(site)


def test_loss_of_both_holders_is_made_good_from_storage(site: Site) -> None:
    """Which gets a step as often as it is worth it: so soon after a failure is the next one expected."""
    job = submitted(site, spares=2, checkpoint="storage_every: auto, node_mttf: 6m, keep: 100")
    site.wait(lambda: told_interval(site, job) in intervals(site), "how often storage gets a step, and why")
    site.sandbox.fail("n2", "power")
    site.sandbox.fail("n3", "power")
    check_end(site, job, drained={"n2", "n3"})
    went_on = told(site, max(x["epoch"] for x in site.detail(job)["launches"]))
    there = list_checkpoints(site.root / "work" / "ck")
    *stored, first = (one.step for one in there if one.complete and one.epoch == 1)
    # The first step, and then that of each window, whose length is a power of two.
    assert first == 1
    assert all(step % 2 == 0 for step in stored), stored
    assert {step for step, _ in went_on.values()} == {max([first, *stored])}
    assert {where for _, where in went_on.values()} >= {"storage"}
    check_losses(site)
