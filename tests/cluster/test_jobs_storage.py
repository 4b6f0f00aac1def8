"""A full disk and a dead mount under a job: its own node is left out, and nobody is drained."""

from __future__ import annotations

import pytest
from jobs import Site, check_end, needs_fuse

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
