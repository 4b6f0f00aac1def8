"""A sandbox with a transomd on it, for tests of whole jobs: submit, hurt, wait, look."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from transom_slurm.sandbox import Sandbox

from transomd.api.client import Client

needs_fuse = pytest.mark.skipif(
    not os.path.exists("/dev/fuse"), reason="NO FUSE: no /dev/fuse here, so no mount can be dead"
)
ENOUGH_S = 120
"""For whatever is waited for: processes start, Slurm and ssh are asked, files are written, and the machine pauses."""
PATIENT = {
    "connect_timeout_s": 10, "probe_timeout_s": 30, "query_timeout_s": 20, "heartbeat_timeout_s": 30,
    "launcher_silence_s": 60, "stall_after_s": 60,
}  # fmt: skip
"""Settings for tests in which no node, agent or launcher is lost: then nobody waits for these times to pass."""


def with_settings(name: str, fixture: str = "site", **settings: float) -> pytest.MarkDecorator:
    """A mark for tests whose site has other settings than :data:`SETTINGS`."""
    return pytest.mark.parametrize(fixture, [settings], indirect=True, ids=[name])


OFTEN = {"interval_s": 3}
"""For tests of what is found on nodes while a program runs on them; probes are most of what a site costs."""
patient = with_settings("patient", **PATIENT)
RING = Path(__file__).with_name("ring.py")
SETTINGS = """\
[daemon]
socket = "{root}/d.sock"
listen = "{hub}:0"
state_dir = "{root}/state"
cycle_s = 0.5
[slurm]
query_timeout_s = 5
[ssh]
key = "{key}"
known_hosts = "{known_hosts}"
connect_timeout_s = 2
[health]
interval_s = 10
probe_timeout_s = 6
gate_timeout_s = 60
[health.modes]
xid = "drain"
gpu-count = "drain"
[watch]
report_s = 1
heartbeat_s = 0.5
heartbeat_timeout_s = 4
launcher_silence_s = 8
launcher_start_s = 60
stall_after_s = 8
first_step_after_s = 30
exit_grace_s = 1
[drain]
node_loss = "drain"
max_fraction = 0.5
"""
JOB = """\
name: ring
command: {python} {ring} {options}
nodes: {nodes}
spares: {spares}
tasks_per_node: {tasks}
gpus_per_node: 8
health: {{collective: false}}
checkpoint: {{dir: {folder}}}
"""


S = TypeVar("S", bound="Site")


class Site:
    """One sandbox, one daemon, one folder."""

    def __init__(self, sandbox: Sandbox, root: Path, more: str = "") -> None:
        self.sandbox = sandbox
        self.root = root
        hub = "10.77.0.254"
        text = SETTINGS.format(root=root, hub=hub, key=sandbox.ssh_key, known_hosts=sandbox.known_hosts)
        (root / "transomd.toml").write_text(text + more)
        self.client = Client(str(root / "d.sock"))
        self.daemon: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        self.until = f"--until {root}/end"
        """For a program that goes on until :meth:`let_end`."""

    def set(self, **settings: float) -> None:
        """Give settings, each of which is one of SETTINGS, other values; a daemon that runs does not see them."""
        config = self.root / "transomd.toml"
        text = config.read_text()
        for key, value in settings.items():
            text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            assert count == 1, f"{key} stands {count} times in {config}"
        config.write_text(text)

    def let_end(self) -> None:
        """Have the programs that were submitted with ``until`` end soon."""
        (self.root / "end").touch()

    def daemon_argv(self) -> list[str]:
        """What runs in the hub."""
        return [sys.executable, "-m", "transomd.daemon", "--config", str(self.root / "transomd.toml")]

    def daemon_env(self) -> dict[str, str]:
        """The environment that it starts with."""
        return {**os.environ, **self.sandbox.env(), **self.env}

    def start_daemon(self) -> None:
        """Start transomd in the hub and wait until it answers."""
        argv = self.sandbox.hub_argv(self.daemon_argv())
        with open(self.root / "transomd.log", "ab") as log:
            self.daemon = subprocess.Popen(
                argv, env=self.daemon_env(), cwd="/", stdout=log, stderr=log, start_new_session=True
            )
        self.wait(self.answers, "transomd answers, and Slurm answers it")

    def answers(self) -> bool:
        """Whether the daemon answers, and has an answer of Slurm's."""
        try:
            return bool(self.client.get("/v1/daemon")["slurm"]["ok"])
        except Exception:
            assert self.daemon is not None
            assert self.daemon.poll() is None, (self.root / "transomd.log").read_text()[-3000:]
            return False

    def kill_daemon(self) -> None:
        """SIGKILL, as a crash would."""
        assert self.daemon is not None
        os.killpg(self.daemon.pid, signal.SIGKILL)
        self.daemon.wait()

    def stop_daemon(self) -> None:
        """SIGTERM, as an administrator would."""
        if self.daemon is not None and self.daemon.poll() is None:
            os.killpg(self.daemon.pid, signal.SIGTERM)
            self.daemon.wait(ENOUGH_S)

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
        """Submit the ring program by the CLI, and return the job's id."""
        work = self.root / "work"
        work.mkdir(exist_ok=True)
        values = {"python": sys.executable, "ring": RING, "options": options, "folder": folder}
        text = JOB.format(**values, nodes=nodes, spares=spares, tasks=tasks)
        (work / "job.yaml").write_text(text + more)
        return int(self.cli("submit", "job.yaml", "--json")["job"]["id"])

    def cli(self, *args: str) -> Any:
        """Run the CLI and return the JSON it prints. Raises CalledProcessError."""
        argv = [sys.executable, "-m", "transom_cli.main", "--socket", str(self.root / "d.sock"), *args]
        done = subprocess.run(argv, cwd=self.root / "work", capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{args}: {done.returncode}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else done.stdout

    def events(self, job: int, kind: str = "") -> list[str]:
        """Return what a job's history says, of one kind or all."""
        found = self.client.get("/v1/events", job=job)["events"]
        return [e["message"] for e in found if kind in ("", e["kind"])]

    def detail(self, job: int) -> dict[str, Any]:
        """Return everything about a job."""
        return dict(self.client.get(f"/v1/jobs/{job}"))

    def job(self, job: int) -> dict[str, Any]:
        """Return a job."""
        return dict(self.detail(job)["job"])

    def wait(self, ready: Callable[[], object], what: str, within_s: float = ENOUGH_S) -> None:
        """Poll until ``ready()``; fail with the daemon's log."""
        end = time.monotonic() + within_s
        while not ready():
            if time.monotonic() > end:
                raise AssertionError(f"not within {within_s:.0f} s: {what}\n{self.story()}")
            time.sleep(0.1)

    def wait_step(self, job: int, step: int, within_s: float = ENOUGH_S) -> None:
        """Wait until the job has come to a step."""
        self.wait(lambda: (self.job(job)["step"] or 0) >= step, f"step {step}", within_s)

    def goes_on(self, job: int, steps: int = 15) -> None:
        """Wait until the job has done some more steps."""
        self.wait_step(job, (self.job(job)["step"] or 0) + steps)

    def wait_state(self, job: int, *states: str, within_s: float = ENOUGH_S) -> dict[str, Any]:
        """Wait until the job is in one of some states that it does not leave soon, and return it."""
        self.wait(lambda: self.job(job)["state"] in states, f"{states}", within_s)
        return self.job(job)

    def drained(self) -> set[str]:
        """Return the nodes that bear a drain in Slurm."""
        nodes = self.client.get("/v1/nodes")["nodes"]
        return {n["name"] for n in nodes if "DRAIN" in n["state"]}

    def slurm_ids(self, job: int) -> list[int]:
        """Return the ids of all Slurm jobs that slurmctld knows as attempts of a job, also those that it ended."""
        told = self.sandbox.run(["squeue", "-h", "-t", "all", "-o", "%i %k"]).stdout.splitlines()
        return sorted(int(line.split()[0]) for line in told if line.split()[1].startswith(f"transom:{job}:"))

    def wait_event(self, job: int, kind: str, within_s: float = ENOUGH_S) -> None:
        """Wait until the job's history has an event of a kind."""
        self.wait(
            lambda: any(e["kind"] == kind for e in self.client.get("/v1/events", job=job)["events"]), kind, within_s
        )

    def story(self) -> str:
        """Return what a person would look at."""
        log = (self.root / "transomd.log").read_text()[-6000:]
        launcher = "\n".join(p.read_text()[-3000:] for p in self.root.glob("work/.transom/*/logs/launcher.log"))
        slurm = (self.sandbox.directory / "log" / "slurmctld.log").read_text()[-3000:]
        return f"--- slurmctld\n{slurm}\n--- transomd\n{log}\n--- launcher\n{launcher}"


@contextmanager
def site_on(sandbox: Sandbox, kind: type[S]) -> Iterator[S]:
    """A site in a folder that every user may enter, not started yet; at its end daemon, sandbox and folder are gone."""
    root = Path(tempfile.mkdtemp(prefix="tsite-"))
    root.chmod(0o755)
    made = kind(sandbox, root)
    try:
        yield made
    finally:
        made.stop_daemon()
        sandbox.down()
        shutil.rmtree(root, ignore_errors=True)


def check_end(site: Site, job: int, *, drained: set[str], attempts: int = 1) -> dict[str, Any]:
    """The job is completed, exactly these nodes are drained, and nothing was submitted twice."""
    site.wait_state(job, "completed")
    site.wait(lambda: site.drained() == drained, f"drained {drained}, is {site.drained()}")
    detail = site.detail(job)
    assert len(detail["attempts"]) == attempts, site.story()
    ids = [a["slurm_job_id"] for a in detail["attempts"]]
    assert site.slurm_ids(job) == sorted(ids)
    epochs = [x["epoch"] for x in detail["launches"]]
    assert epochs == sorted(set(epochs))
    return detail
