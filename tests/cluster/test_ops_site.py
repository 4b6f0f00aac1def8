"""Running a real site: paused and resumed, checked, reloaded, watched by systemd and Prometheus, telling people."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import PATIENT, Site, site_on, with_settings
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.cluster

METRICS = "10.77.0.254:9777"
MORE = """\
[notify]
command = "cat >> {root}/notices; echo >> {root}/notices"
"""


class Systemd:
    """The socket on which systemd would listen; ``heard`` is all that was said."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.heard: list[str] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while (said := self._socket.recv(4096).decode()) != "enough":
            self.heard += said.splitlines()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"enough", str(self._path))
        self._thread.join()
        self._socket.close()


class OpsSite(Site):
    """A site with a command for notices, a port for Prometheus, and something like systemd."""

    def __init__(self, sandbox: Any, root: Path) -> None:
        super().__init__(sandbox, root)
        self.file = root / "transomd.toml"
        text = self.file.read_text().replace("[slurm]", f'metrics = "{METRICS}"\n[slurm]')
        self.file.write_text(text + MORE.format(root=root))
        self.systemd = Systemd(root / "notify")

    def hangup(self) -> None:
        """SIGHUP, as `systemctl reload` does."""
        assert self.daemon is not None
        os.kill(int(self.pid()), signal.SIGHUP)

    def pid(self) -> str:
        """The daemon's process, as it is seen from here."""
        found = subprocess.run(
            ["pgrep", "-f", f"transomd.daemon --config {self.file}"], capture_output=True, text=True, check=True
        )
        return found.stdout.split()[-1]

    def log(self) -> str:
        return (self.root / "transomd.log").read_text()

    def ask(self, *words: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command in the hub, as a user."""
        argv = [sys.executable, "-m", "transom_cli.main", "--socket", str(self.root / "d.sock"), *words]
        if user:
            argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *argv]
        env = {**os.environ, **self.sandbox.env(), "TRANSOM_CONFIG": str(self.file), "COLUMNS": "80"}
        argv = self.sandbox.hub_argv(argv)
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False, cwd="/")

    def scrape(self) -> dict[tuple[str, ...], float]:
        """Read /metrics over TCP, as Prometheus does."""
        program = (
            f"import urllib.request as u; print(u.urlopen('http://{METRICS}/metrics', timeout=30).read().decode())"
        )
        argv = self.sandbox.hub_argv([sys.executable, "-c", program])
        text = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
        return {
            (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def notices(self) -> list[dict[str, Any]]:
        """What people were told."""
        file = self.root / "notices"
        return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


@pytest.fixture
def ops(make_sandbox: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpsSite]:
    with site_on(make_sandbox(5), OpsSite) as made:
        made.set(**getattr(request, "param", {}))
        monkeypatch.setenv("NOTIFY_SOCKET", str(made.root / "notify"))
        try:
            made.start_daemon()
            yield made
        finally:
            made.stop_daemon()
            made.systemd.close()


def test_a_pause_holds_everything_through_a_crash_until_a_person_resumes(ops: OpsSite) -> None:
    job = ops.submit("--then 20")
    ops.wait_step(job, 5)
    assert "is paused by root: rack move" in ops.cli("pause", "--reason", "rack move")
    lost = ops.job(job)["nodes"][-1]
    ops.sandbox.fail(lost, "power")
    ops.wait(lambda: ops.job(job)["withheld"], "something is withheld")
    ops.wait_event(job, "drain-refused")
    ops.kill_daemon()
    ops.start_daemon()
    ops.wait(lambda: ops.job(job)["withheld"], "it is withheld still")
    assert ops.drained() == set()
    assert len(ops.detail(job)["launches"]) == 1
    waiting = ops.submit("--steps 3", nodes=1, spares=0)
    ops.wait(lambda: ops.job(waiting)["withheld"] == "submit attempt 1", "the new job waits")
    assert len(ops.sandbox.run(["squeue", "-h", "-t", "all", "-o", "%i"]).stdout.split()) == 1
    assert ops.scrape()[("transom_paused",)] == 1
    found = ops.ask("doctor")
    assert found.returncode == 6
    assert "PROBLEM  transom is paused by root: rack move" in found.stdout
    assert f"job {waiting}: would submit attempt 1" in found.stdout

    assert "resumed pause: stopped by root: rack move" in ops.cli("resume-actions")
    ops.wait_state(job, "completed", within_s=150)
    ops.wait_state(waiting, "completed")
    ops.wait(lambda: ops.drained() == {lost}, "the lost node is drained")
    story = ops.cli("incident", str(ops.detail(job)["incidents"][0]["id"]))
    assert f"  {lost}: drained: transom[node-loss]" in story
    assert "detected by" in story
    ops.wait(lambda: [n["node"] for n in ops.notices()] == [lost], "people are told of the drain")
    assert ops.notices()[0]["event"] == "node-drained"
    metrics = ops.scrape()
    assert metrics[("transom_jobs_ended_total", "state=completed")] == 2
    assert metrics[("transom_restarts_total", "class=host")] == 1
    assert metrics[("transom_paused",)] == 0
    assert f"{lost}: blamed in 1 incident of 1 job, drained by transom 1 time" in ops.cli("history", lost)


@with_settings("patient", "ops", **PATIENT)
def test_checks_rights_reload_and_signs_of_life(ops: OpsSite) -> None:
    ops.wait(lambda: ops.systemd.heard.count("WATCHDOG=1") > 3, "signs of life")
    assert ops.systemd.heard[0] == "READY=1"
    assert any(line.startswith("STATUS=0 active jobs") for line in ops.systemd.heard)

    done = ops.ask("check", "n[1-5]")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "n[1-5]"), done.stdout
    ops.sandbox.fail("n2", "xid:79")
    ops.sandbox.fail("n3", "net-cut")
    done = ops.ask("check", "n[1-3]", "--check", "xid")
    assert done.returncode == 6, done.stdout
    assert done.stdout.startswith("n1: fit (1 check)\nn2: unfit\n  - xid: unfit")
    assert "n3: unknown\n" in done.stdout
    assert ops.ask("check", "n3").returncode == 7
    assert ops.ask("check", "n9").returncode == 5
    assert ops.ask("check", "n1", "--check", "nonsense").returncode == 2
    assert ops.drained() == set(), "a check drains nothing"

    nobody = 65534
    assert ops.ask("status", user=nobody).returncode == 0
    for words in (["check", "n1"], ["pause"], ["resume-actions"], ["history"]):
        assert ops.ask(*words, user=nobody).returncode == 4, words
    assert "only an administrator is told more" in ops.ask("doctor", user=nobody).stdout

    text = ops.file.read_text()
    ops.file.write_text(text.replace("cycle_s = 0.5", "cycle_s = never"))
    ops.hangup()
    ops.wait(lambda: "the site file was not taken" in ops.log(), "the bad file is refused")
    assert f"{ops.file}:" in ops.log()
    changed = text.replace("cycle_s = 0.5", 'cycle_s = 0.4\nadmins = ["root", "nobody"]')
    ops.file.write_text(changed.replace("connect_timeout_s = 10", "connect_timeout_s = 3"))
    ops.hangup()
    said = "now daemon.cycle_s, daemon.admins; only after a restart: ssh.connect_timeout_s"
    ops.wait(lambda: said in ops.log(), said)
    assert ops.ask("history", user=nobody).returncode == 0
    ops.wait(lambda: ops.systemd.heard.count("READY=1") == 3, "both reloads are told")
    assert ops.systemd.heard.count("RELOADING=1") == 2

    checked = subprocess.run(
        ops.sandbox.hub_argv([sys.executable, "-m", "transomd.daemon", "--config", str(ops.file), "--check"]),
        env={**os.environ, **ops.sandbox.env()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"note     daemon: a transomd runs on {ops.root}/state already" in checked.stdout
    assert "ok       rights: Slurm lets this user change nodes" in checked.stdout
    ops.stop_daemon()
    ops.wait(lambda: ops.systemd.heard[-1] == "STOPPING=1", "the end is told")
