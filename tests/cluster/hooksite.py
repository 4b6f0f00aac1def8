"""A sandbox whose nodes run the hooks, and a transomd that they tell: what the tests of hooks share."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import ENOUGH_S, Site
from transom_slurm.parsers import parse_nodes
from transom_slurm.sandbox import Sandbox

HUB = "10.77.0.254"
SPOOL = "/run/transom-hooks"
SAID = "only-what-the-job-says"
SOON_S = 40
"""A hook and its job are through by then, on a machine that pauses; one that hangs is ended without a word before."""
DEAF = """\
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=64)
kept = []
while True:
    kept.append(server.accept())
"""


class HookSite:
    """Jobs by plain sbatch; hooks that are installed anew for each test."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox = sandbox
        self.folder = folder

    @contextmanager
    def daemon(self, **sections: dict[str, Any]) -> Iterator[Site]:
        """A transomd with more settings (``modes={"xid": "drain"}, drain={"per_hour": 1}``) that the hooks know."""
        root = Path(tempfile.mkdtemp(prefix="thooks-"))
        root.chmod(0o755)
        (root / "work").mkdir()
        site = Site(self.sandbox, root)
        file = root / "transomd.toml"
        modes = "".join(f'{check} = "{mode}"\n' for check, mode in sections.pop("modes", {}).items())
        text = file.read_text().replace('xid = "drain"\ngpu-count = "drain"\n', modes)
        for name, keys in sections.items():
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            there = f"[{name}]\n" in text
            text = text.replace(f"[{name}]\n", f"[{name}]\n{lines}") if there else f"{text}[{name}]\n{lines}"
        file.write_text(text)
        try:
            site.start_daemon()
            self.install(file, (root / "state/port").read_text())
            yield site
        finally:
            site.stop_daemon()
            shutil.rmtree(root)

    def install(self, config: Path, port: str, host: str = HUB) -> None:
        """``transom hooks install``, as an administrator types it."""
        argv = [sys.executable, "-m", "transom_cli.main", "hooks", "install", str(self.folder)]
        argv += ["--config", str(config), "--url", f"http://{host}:{port}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert f"Prolog={self.folder}/prolog" in done.stdout

    def patient(self) -> None:
        """Let a prolog wait 5 s for its answer: what matters is what it says, and this machine may be very busy."""
        file = self.folder / "prolog"
        text = file.read_text()
        assert "\nANSWER = 2.0\n" in text
        file.write_text(text.replace("\nANSWER = 2.0\n", "\nANSWER = 5.0\n"))

    def point(self, url: str) -> None:
        """Let the hooks think that transomd is somewhere else."""
        file = self.folder / "hooks.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "url": url}))

    @contextmanager
    def other(self, program: str, port: int) -> Iterator[None]:
        """Something else that listens on a port of the hub: DEAF, or a web server of somebody's."""
        argv = (
            ["-c", DEAF, str(port)] if program == "deaf" else ["-m", "http.server", "-d", str(self.folder), str(port)]
        )
        log = subprocess.DEVNULL
        process = subprocess.Popen(self.sandbox.hub_argv([sys.executable, *argv]), stdout=log, stderr=log)
        try:
            self._wait_listening(port)
            yield
        finally:
            process.kill()
            process.wait()

    def _wait_listening(self, port: int) -> None:
        end = time.monotonic() + ENOUGH_S
        connect = ["bash", "-c", f"exec 3<>/dev/tcp/{HUB}/{port}"]
        while self.sandbox.run(connect, check=False).returncode:
            assert time.monotonic() < end, f"nothing listens on {port}"
            time.sleep(0.1)

    def submit(self, node: str, *options: str, command: str = f"echo {SAID}") -> str:
        """Submit to one node by sbatch, not through transom; the job's id."""
        script = f"#!/bin/sh\n{command}\n"
        (self.folder / "job.sh").write_text(script)
        where = ["-D", str(self.folder), "-o", f"{self.folder}/%j.out", "-w", node, *options]
        return self.sandbox.run(["sbatch", "--parsable", *where, f"{self.folder}/job.sh"]).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """One job as scontrol shows it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.sandbox.run(["scontrol", "-o", "show", "job", job]).stdout))

    def wait_job(self, job: str, *states: str) -> dict[str, str]:
        """Poll until a job is in one of some states."""
        end = time.monotonic() + ENOUGH_S
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < end, f"not {states}: {found}"
            time.sleep(0.1)
        return found

    def ended_well(self, job: str) -> None:
        """A job is completed, and in its output stands what it said itself and not a byte more."""
        self.wait_job(job, "COMPLETED")
        assert (self.folder / f"{job}.out").read_text() == f"{SAID}\n"

    def node(self, node: str) -> dict[str, str]:
        """State, reason and comment of a node."""
        argv = ["env", "SLURM_TIME_FORMAT=%s", "scontrol", "-o", "show", "node", node]
        found = parse_nodes(self.sandbox.run(argv).stdout)[node]
        return {"State": found.state_text, "Reason": found.reason, "Comment": found.comment}

    def say(self, node: str, kind: str) -> tuple[str, float]:
        """Run a hook by hand on a node: its sentence, and how long it took in seconds."""
        began = time.monotonic()
        done = self.sandbox.run(["env", "-i", f"{self.folder}/{kind}", "--say"], node=node, check=False)
        return done.stderr, time.monotonic() - began

    def spooled(self, node: str) -> list[str]:
        """What a node keeps to tell later."""
        done = self.sandbox.run(["find", SPOOL, "-name", "*.json", "-printf", "%f\n"], node=node, check=False)
        return sorted(done.stdout.split())


def history(site: Site, node: str, *kinds: str) -> list[dict[str, Any]]:
    """What transomd recorded about a node."""
    events = site.client.get("/v1/events", node=node)["events"]
    return [event for event in events if not kinds or event["kind"] in kinds]
