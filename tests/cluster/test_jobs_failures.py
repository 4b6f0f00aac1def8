"""Whole jobs on a real Slurm, each hurt in one way: completed in the end, the right node drained, and no other."""

from __future__ import annotations

import pytest
from jobs import OFTEN, PATIENT, Site, check_end, patient, with_settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_power_loss_of_a_node(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    detail = check_end(site, job, drained={"n2"})
    assert detail["launches"][-1]["nodes"] == ["n1", "n4", "n3"], "n4 takes the ranks of n2"
    assert (detail["incidents"][0]["class"], detail["incidents"][0]["nodes"]) == ("host", ["n2"])
    assert site.sandbox.slurm_states()["n2"].startswith("d"), "DOWN, and drained: it comes back by nothing of its own"
    site.sandbox.heal("n2")
    assert "state=resume" in site.cli("undrain", "n2", "--dry-run")
    assert site.cli("undrain", "n2").startswith("n2: undrained")
    site.sandbox.wait_idle(60)


def test_power_loss_of_the_batch_host(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n1", "power")
    detail = check_end(site, job, drained={"n1"})
    assert "n1" not in detail["launches"][-1]["nodes"]


def test_cut_cable(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "net-cut")
    check_end(site, job, drained={"n2"})


def test_slurmd_killed(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "slurmd-kill")
    detail = check_end(site, job, drained={"n2"})
    assert "n2" not in detail["launches"][-1]["nodes"]


@with_settings("patient-and-probed-often", **PATIENT, **OFTEN)
def test_xid_79(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n3", "xid:79")
    detail = check_end(site, job, drained={"n3"})
    assert detail["incidents"][0]["class"] == "gpu-hardware"


@patient
def test_rank_killed(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "rank-kill")
    detail = check_end(site, job, drained=set())
    assert detail["incidents"][0]["blame"] == "unknown"


def test_rank_stopped(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "rank-stop")
    detail = check_end(site, job, drained=set())
    assert detail["incidents"][0]["class"] == "nccl-hang"


def test_rank_stopped_and_its_peers_give_up_in_words_of_their_own(site: Site) -> None:
    job = site.submit("--then 20 --patience 12", more="watch: {stall_after: 90}\n")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "rank-stop")
    detail = check_end(site, job, drained=set())
    incident = detail["incidents"][0]
    told = [incident[key] for key in ("detected_by", "class", "blame", "ranks", "action")]
    assert told == ["exit", "nccl-hang", "unknown", [1], "restart"]
    assert "rank 1 on n2 is stopped" in incident["summary"]
    assert "a peer did not answer in time" in incident["summary"]
    assert [x["nodes"] for x in detail["launches"]] == [["n1", "n2", "n3"]] * 2, "in place"


def test_two_nodes_at_once(site: Site) -> None:
    job = site.submit("--then 20", spares=2)
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    site.sandbox.fail("n3", "power")
    detail = check_end(site, job, drained={"n2", "n3"})
    assert detail["launches"][-1]["nodes"] == ["n1", "n4", "n5"]


def test_node_lost_during_recovery(site: Site) -> None:
    job = site.submit("--then 40", spares=2)
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    site.wait_event(job, "failure")
    site.sandbox.fail("n3", "power")
    check_end(site, job, drained={"n2", "n3"})


def test_new_attempt_when_no_spare_is_left(site: Site) -> None:
    job = site.submit("--then 20", spares=0)
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    detail = check_end(site, job, drained={"n2"}, attempts=2)
    assert detail["attempts"][1]["excluded"] == ["n2"]


@patient
def test_unfit_node_is_replaced_before_the_start(site: Site) -> None:
    site.sandbox.fail("n1", "gpu-lost")
    job = site.submit("--steps 10")
    detail = check_end(site, job, drained={"n1"})
    assert [x["nodes"] for x in detail["launches"]] == [["n2", "n3", "n4"]]


@patient
def test_exception_on_all_ranks(site: Site) -> None:
    job = site.submit("--raise-at 8")
    ended = site.wait_state(job, "failed", "completed")
    assert ended["state"] == "failed"
    detail = site.detail(job)
    assert len(detail["attempts"]) == len(detail["launches"]) == 1
    assert "wrong shape" in site.cli("status", str(job))
    assert site.drained() == set()


@patient
def test_scancel_by_a_person(site: Site) -> None:
    job = site.submit(site.until)
    site.wait_step(job, 5)
    site.sandbox.run(["scancel", str(site.job(job)["slurm_job_id"])])
    assert site.wait_state(job, "cancelled", "failed", "completed")["state"] == "cancelled"
    assert site.drained() == set()


@patient
def test_cancel(site: Site) -> None:
    job = site.submit(site.until)
    site.wait_step(job, 5)
    site.cli("cancel", str(job))
    assert site.wait_state(job, "cancelled", "failed", "completed")["state"] == "cancelled"
