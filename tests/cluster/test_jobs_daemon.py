"""Whole jobs while the daemon, the controller or a person gets in the way."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest
from jobs import ENOUGH_S, Site, check_end, patient
from transom_slurm.sandbox import processes

from transomd.launch.rundir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.mark.parametrize("moment", ["failure", "verdict", "restart"])
def test_daemon_killed_during_recovery(site: Site, moment: str) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    site.wait_event(job, moment)
    site.kill_daemon()
    time.sleep(1)
    site.start_daemon()
    check_end(site, job, drained={"n2"})


def test_node_lost_while_the_daemon_is_away(site: Site) -> None:
    job = site.submit("--then 40")
    site.wait_step(job, 7)
    run_dir = RunDir(site.job(job)["run_dir"])
    site.kill_daemon()
    site.sandbox.fail("n2", "power")
    site.wait(lambda: run_dir.epochs() == [1, 2], "the launcher restarts by itself")
    site.start_daemon()
    detail = check_end(site, job, drained={"n2"})
    assert len(detail["launches"]) == 2, "the launcher restarts in place on its grant"
    assert any(e["signature"] == "HEARTBEAT-LOST" for e in detail["incidents"][0]["evidence"])


@patient
def test_daemon_away_from_submission_to_end(site: Site) -> None:
    job = site.submit("--steps 30")
    site.wait_state(job, "running")
    site.kill_daemon()
    time.sleep(12)
    site.start_daemon()
    detail = check_end(site, job, drained=set())
    assert len(detail["launches"]) == 1


@patient
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_controller_away_for_a_minute(site: Site, how: str) -> None:
    job = site.submit(site.until)
    site.wait_step(job, 7)
    time.sleep(8)
    before = site.detail(job)
    pid = int((site.sandbox.directory / "run" / "slurmctld.pid").read_text()) if how == "stopped" else 0
    if how == "stopped":
        processes.stop([pid])
    else:
        site.sandbox.stop_controller(kill=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert site.job(job)["state"] == "running"
        time.sleep(1)
    if how == "stopped":
        os.kill(pid, signal.SIGCONT)
    else:
        site.sandbox.start_controller()
    site.wait(site.answers, "Slurm answers again")
    site.goes_on(job)
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert [x["epoch"] for x in detail["launches"]] == [x["epoch"] for x in before["launches"]]
    assert detail["incidents"] == []


def test_a_persons_drain_is_never_touched(site: Site) -> None:
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.run(["scontrol", "update", "nodename=n2", "state=drain", "reason=ADMIN SHUTDOWN"])
    site.sandbox.fail("n2", "power")
    check_end(site, job, drained={"n2"})
    time.sleep(5)
    told = site.sandbox.run(["scontrol", "-o", "show", "node", "n2"]).stdout
    assert "Reason=ADMIN SHUTDOWN" in told
    results = site.client.post("/v1/nodes/undrain", {"nodes": "n2"})["results"]
    assert not results[0]["done"]
    assert "ADMIN SHUTDOWN" in site.sandbox.run(["scontrol", "-o", "show", "node", "n2"]).stdout


@patient
def test_database_gone_while_the_daemon_is_away(site: Site) -> None:
    """A daemon that does not find its database does not start with an empty one, and the job goes on without it."""
    job = site.submit(site.until)
    site.wait_step(job, 7)
    site.sandbox.fail("hub", "db-gone")
    site.kill_daemon()
    done = site.sandbox.run(site.daemon_argv(), check=False, timeout=ENOUGH_S)
    assert done.returncode == 1
    assert "transom.db: this is not a file" in done.stderr
    site.sandbox.heal("hub")
    site.start_daemon()
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert len(detail["launches"]) == 1


@patient
def test_a_daemon_with_an_empty_database_ends_nothing(site: Site) -> None:
    job = site.submit(site.until)
    site.wait_step(job, 7)
    site.kill_daemon()
    (site.root / "state").rename(site.root / "aside")
    (site.root / "state").mkdir(0o700)
    (site.root / "state" / "port").write_text((site.root / "aside" / "port").read_text())
    site.start_daemon()
    time.sleep(8)
    site.kill_daemon()
    shutil.rmtree(site.root / "state")
    (site.root / "aside").rename(site.root / "state")
    site.start_daemon()
    site.let_end()
    detail = check_end(site, job, drained=set())
    assert len(detail["launches"]) == 1
