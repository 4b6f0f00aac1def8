"""A transomd that an ordinary user runs for their own jobs, on a cluster where they have no rights at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import JOB, RING, SETTINGS, Site, check_end
from people import Person
from transom_slurm.sandbox import Sandbox

from transomd.api.client import Client
from transomd.places import personal_config, personal_socket, personal_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class OwnSite(Site):
    """The daemon of one user, in their home, with the places that it chooses by itself."""

    def __init__(self, sandbox: Sandbox, person: Person, *, ssh: bool) -> None:
        self.sandbox, self.person, self.root = sandbox, person, person.home
        self.env = person.env()
        own = person.home / ".ssh"
        key = own / "id"
        text = SETTINGS.format(root=person.home, hub="10.77.0.254", key=key, known_hosts=sandbox.known_hosts)
        kept = [line for line in text.splitlines() if not line.startswith(("socket", "listen", "state_dir"))]
        config = personal_config(self.env)
        for folder in (own, config.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key.unlink(missing_ok=True)
        if ssh:
            shutil.copy(sandbox.ssh_key, key)
        else:
            key.write_text("no key at all\n")
        config.write_text("\n".join(kept).replace("[daemon]", '[daemon]\nlisten = "10.77.0.254:0"') + "\n")
        for path in (person.home, *person.home.rglob("*")):
            os.chown(path, person.uid, person.who.gid)
        key.chmod(0o600)
        self.socket = personal_socket(self.env)
        self.client = Client(str(self.socket))
        self.daemon: subprocess.Popen[bytes] | None = None

    def daemon_argv(self) -> list[str]:
        return self.person.argv([sys.executable, "-m", "transomd.daemon"])

    def daemon_env(self) -> dict[str, str]:
        return {"SLURM_CONF": self.sandbox.env()["SLURM_CONF"], "PATH": os.environ["PATH"]}

    def submit(
        self,
        options: str = "",
        *,
        nodes: int = 3,
        spares: int = 1,
        tasks: int = 1,
        more: str = "",
        folder: str = "checkpoints",
    ) -> int:
        shape = {"nodes": nodes, "spares": spares, "tasks": tasks, "folder": folder}
        text = JOB.format(python=sys.executable, ring=RING, options=options, **shape)
        done = self.person.run([sys.executable, "-m", "transom_cli.main", "submit", "-", "--json"], stdin=text + more)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["job"]["id"])

    def story(self) -> str:
        log = (self.root / "transomd.log").read_text()[-6000:]
        return log + "\n".join(p.read_text()[-3000:] for p in self.root.glob(".transom/*/logs/launcher.log"))


@pytest.fixture(scope="module")
def cluster(persons: list[Person], make_sandbox: Any) -> Sandbox:
    sandbox: Sandbox = make_sandbox(5)
    return sandbox


@contextlib.contextmanager
def own(cluster: Sandbox, person: Person, *, ssh: bool) -> Iterator[OwnSite]:
    site = OwnSite(cluster, person, ssh=ssh)
    try:
        site.start_daemon()
        yield site
    finally:
        site.stop_daemon()
        cluster.reset()


def test_power_loss_of_a_node(cluster: Sandbox, persons: list[Person]) -> None:
    alice, bob = persons
    with own(cluster, alice, ssh=True) as site:
        told = site.client.get("/v1/daemon")
        assert (told["mode"], told["owner"]) == ("personal", alice.name)
        job = site.submit("--then 20")
        site.wait_step(job, 7)
        site.wait(lambda: _reached(site, "n1"), "nodes are looked at as the user")
        site.sandbox.fail("n2", "power")
        detail = check_end(site, job, drained=set())
        assert "n2" not in detail["launches"][-1]["nodes"]
        incident = detail["incidents"][0]
        assert (incident["nodes"], incident["action"]) == (["n2"], "exclude")
        assert "none is drained" in incident["summary"]
        closed(site, alice, bob)
        assert site.drained() == set()


def _reached(site: OwnSite, node: str) -> bool:
    """Whether the newest look at a node came to it."""
    return {n["name"]: n["reached"] for n in site.client.get("/v1/nodes")["nodes"]}[node] is True


def closed(site: OwnSite, alice: Person, bob: Person) -> None:
    """Nobody else is served; nothing can be drained by hand either; files are the owner's alone."""
    state = personal_state(site.env)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in state.rglob("*")} == {0}
    assert {p.stat().st_uid for p in state.rglob("*")} == {alice.uid}
    asked = bob.transom("--socket", str(site.socket), "status")
    assert (asked.returncode, "may not open its socket" in asked.stderr) == (4, True)
    drained = alice.transom("drain", "n5", "--reason", "mine")
    assert (drained.returncode, "drains no nodes" in drained.stderr) == (4, True)
    port = (state / "port").read_text()
    forged = [sys.executable, "-m", "transom_cli.main", "--socket", f"http://10.77.0.254:{port}", "status"]
    done = subprocess.run(site.sandbox.node_argv("n1", bob.argv(forged)), capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert f"{alice.name}'s own" in done.stderr


def test_without_ssh_the_gate_opens_and_its_own_agents_fence(cluster: Sandbox, persons: list[Person]) -> None:
    with own(cluster, persons[0], ssh=False) as site:
        job = site.submit("--then 20", folder="second")
        site.wait_step(job, 7)
        site.sandbox.fail(site.job(job)["nodes"][1], "rank-kill")
        detail = check_end(site, job, drained=set())
        assert len(detail["launches"]) == 2
        probed = [n["reached"] for n in site.client.get("/v1/nodes")["nodes"]]
        assert True not in probed


def test_a_loss_of_the_batch_host_and_a_killed_daemon(cluster: Sandbox, persons: list[Person]) -> None:
    with own(cluster, persons[0], ssh=True) as site:
        job = site.submit("--then 30", folder="third")
        site.wait_step(job, 7)
        number = site.job(job)["slurm_job_id"]
        told = site.sandbox.run(["scontrol", "-o", "show", "job", str(number)]).stdout
        host = next(word.partition("=")[2] for word in told.split() if word.startswith("BatchHost="))
        site.sandbox.fail(host, "power")
        site.wait_event(job, "failure")
        site.kill_daemon()
        time.sleep(1)
        site.start_daemon()
        detail = check_end(site, job, drained=set())
        assert host not in detail["launches"][-1]["nodes"]


def test_site_mode_is_refused_without_root(persons: list[Person]) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "t.toml").write_text('[daemon]\nmode = "site"\n')
        done = persons[0].run([sys.executable, "-m", "transomd.daemon", "--config", f"{name}/t.toml"])
    assert (done.returncode, "needs root" in done.stderr) == (2, True)
