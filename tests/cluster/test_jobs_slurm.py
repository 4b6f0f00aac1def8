"""Whole jobs while Slurm itself forgets, hangs, preempts or ends them at their time limit."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jobs import PATIENT, Site, check_end, site_on

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP",
)


@pytest.fixture
def own_site(make_sandbox: Any, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site on a sandbox with the lines of slurm.conf that a test asks for."""
    with site_on(make_sandbox(5, extra=getattr(request, "param", ())), Site) as made:
        yield made


@pytest.mark.slow
def test_slurmctld_forgets_a_submission_and_gives_its_id_away(site: Site) -> None:
    """What was submitted within seconds of a crash is not in the saved state; the next job gets the same number."""
    site.submit("--steps 5")
    time.sleep(6)
    job = site.submit("--steps 20")
    site.wait(lambda: site.job(job)["slurm_job_id"], "submitted")
    lost = site.job(job)["slurm_job_id"]
    site.sandbox.stop_controller(kill=True)
    site.sandbox.start_controller()
    if not site.sandbox.run(["squeue", "-h", "-j", str(lost)], check=False).stdout.strip():
        other = site.sandbox.run(["sbatch", "--parsable", "-N1", "-o/dev/null", "--wrap", "sleep 60"]).stdout.strip()
        assert int(other) == lost, "slurmctld lost the number too"
    ended = site.wait_state(job, "completed", "failed", within_s=200)
    assert ended["state"] == "completed", ended["reason"]
    assert len({x["epoch"] for x in site.detail(job)["launches"]}) == len(site.detail(job)["launches"])


@pytest.mark.slow
@pytest.mark.parametrize("own_site", [("MinJobAge=5",)], indirect=True)
def test_job_that_slurm_forgot_before_the_daemon_asked(own_site: Site) -> None:
    """No accounting, MinJobAge 5 s, and nobody heard the launcher's last word: the program is not run again."""
    own_site.start_daemon()
    job = own_site.submit("--steps 30")
    own_site.wait_step(job, 7)
    own_site.kill_daemon()
    done = own_site.root / "work"
    own_site.wait(lambda: list(done.glob(".transom/*/claims/completed")), "the program has ended")
    own_site.sandbox.run(["scancel", *own_site.sandbox.run(["squeue", "-h", "-o", "%A"]).stdout.split()])
    own_site.wait(lambda: not own_site.sandbox.run(["squeue", "-h", "-t", "all"]).stdout, "Slurm forgets it")
    own_site.start_daemon()
    own_site.wait_state(job, "completed", within_s=150)
    assert len(own_site.detail(job)["launches"]) == 1


def test_sbatch_that_hangs_after_it_was_accepted(own_site: Site) -> None:
    tools = own_site.root / "tools"
    tools.mkdir()
    real = shutil.which("sbatch")
    wrapper = tools / "sbatch"
    wrapper.write_text(f'#!/bin/sh\n{real} "$@" >/dev/null\nexec sleep 600\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    own_site.env = {"PATH": f"{tools}:{own_site.sandbox.env()['PATH']}"}
    toml = own_site.root / "transomd.toml"
    toml.write_text(toml.read_text().replace("[slurm]", "[slurm]\nsubmit_timeout_s = 2"))
    own_site.set(**PATIENT)
    own_site.start_daemon()
    job = own_site.submit("--steps 20")
    detail = check_end(own_site, job, drained=set())
    assert len(detail["launches"]) == 1


@pytest.mark.slow
def test_sbatch_that_waits_before_a_stopped_slurmctld(site: Site) -> None:
    """Its message lies in slurmctld's queue when transom gives up on it; it counts when slurmctld goes on."""
    site.stop_daemon()
    toml = site.root / "transomd.toml"
    toml.write_text(toml.read_text().replace("[slurm]", "[slurm]\nsubmit_timeout_s = 3"))
    site.start_daemon()
    first = site.submit("--steps 5")
    site.sandbox.fail("hub", "ctld-stop")
    job = site.submit("--steps 20")
    site.wait(lambda: "submitting to Slurm:" in site.job(job)["reason"], "sbatch fails")
    site.sandbox.heal("hub")
    check_end(site, job, drained=set())
    check_end(site, first, drained=set())


def test_drained_by_a_person_in_mid_recovery(site: Site) -> None:
    job = site.submit("--then 20", spares=2)
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    site.wait_event(job, "failure")
    site.sandbox.run(["scontrol", "update", "nodename=n[2,4]", "state=drain", "reason=looking at it"])
    check_end(site, job, drained={"n2", "n4"})
    time.sleep(3)
    told = site.sandbox.run(["scontrol", "-o", "show", "node", "n[2,4]"]).stdout
    assert told.count("Reason=looking at it") == 2


def test_suspended_by_an_administrator(site: Site) -> None:
    """For longer than any silence is borne: launcher, agents and ranks are all stopped, and all go on."""
    job = site.submit(site.until)
    site.wait_step(job, 7)
    (number,) = site.slurm_ids(job)
    site.sandbox.run(["scontrol", "suspend", str(number)])
    site.wait(lambda: "is suspended" in site.job(job)["reason"], "it is said")
    time.sleep(12)
    site.sandbox.run(["scontrol", "resume", str(number)])
    site.goes_on(job)
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert (len(detail["launches"]), detail["incidents"]) == (1, [])


@pytest.mark.parametrize("own_site", [PREEMPTION], indirect=True)
def test_preemption(own_site: Site) -> None:
    own_site.set(**PATIENT)
    own_site.start_daemon()
    more = "policy: {max_restarts: 0, max_attempts: 1}\n"
    job = own_site.submit("--then 20", nodes=4, spares=1, more=more)
    own_site.wait_step(job, 12)
    # So the program is told to end first, and nobody else is.
    own_site.sandbox.run(["scontrol", "update", "partitionname=main", "gracetime=8"])
    own_site.sandbox.run(["sbatch", "-p", "urgent", "-N5", "--exclusive", "-o/dev/null", "--wrap", "sleep 3"])
    detail = check_end(own_site, job, drained=set(), attempts=2)
    assert [(i["class"], i["blame"]) for i in detail["incidents"]] == [("preemption", "external")]
    assert [x["attempt"] for x in detail["launches"]] == [1, 2]
    assert detail["launches"][-1]["first_step"] > 5


@pytest.mark.slow
def test_time_limit_is_chained(site: Site) -> None:
    """Slurm's shortest limit is a minute, and its warning may come as early as it likes in so short a one."""
    more = "time_limit: '1'\npolicy: {max_restarts: 0, max_attempts: 1}\n"
    job = site.submit("--steps 600", more=more)
    site.wait_state(job, "completed", "failed", within_s=280)
    detail = site.detail(job)
    attempts = len(detail["attempts"])
    assert attempts > 1
    check_end(site, job, drained=set(), attempts=attempts)
    assert {i["class"] for i in detail["incidents"]} == {"time-limit"}
    assert detail["launches"][1]["first_step"] > 5


BACKUP = ("SlurmctldHost=n5(10.77.0.5)", "SlurmctldTimeout=5")


@pytest.mark.slow
@pytest.mark.parametrize("own_site", [BACKUP], indirect=True)
def test_a_backup_slurmctld_takes_over(own_site: Site) -> None:
    """It runs on a node that the job does not use, and shares the state folder; its pid file is its own."""
    run = own_site.sandbox.directory / "run"
    own_site.sandbox.run(["sh", "-c", f"mount -t tmpfs tmpfs {run} && slurmctld"], node="n5")
    own_site.start_daemon()
    job = own_site.submit(own_site.until, spares=0)
    own_site.wait_step(job, 60)
    own_site.sandbox.fail("hub", "ctld-kill")

    def taken_over() -> bool:
        said = own_site.sandbox.run(["scontrol", "ping"], check=False).stdout
        return "(primary) at hub is DOWN" in said and own_site.sandbox.run(["squeue"], check=False).returncode == 0

    own_site.wait(taken_over, "the backup answers")
    assert own_site.job(job)["state"] == "running"
    own_site.wait(lambda: own_site.client.get("/v1/daemon")["slurm"]["ok"], "transomd hears the backup")
    own_site.goes_on(job)
    own_site.let_end()
    detail = check_end(own_site, job, drained=set())
    assert len(detail["launches"]) == 1
    assert detail["incidents"] == []
