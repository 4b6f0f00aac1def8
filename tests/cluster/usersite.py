"""A site with ordinary users. Its transomd is root with three capabilities: none over files, as on root_squash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs import JOB, RING, Site
from people import Person
from transom_slurm.sandbox import Sandbox

ONLY_THESE_RIGHTS = ["setpriv", "--bounding-set=-all,+setuid,+setgid,+kill", "--inh-caps=-all", "--"]
"""What packaging/transomd.service leaves to root: to become a user, and to end what it started as one."""


class UserSite(Site):
    """``ids`` is where every use of the site's python by transom leaves the uid and groups it ran with."""

    def __init__(self, sandbox: Sandbox, root: Path) -> None:
        super().__init__(sandbox, root)
        self.socket = str(root / "d.sock")
        (root / "work").mkdir()
        self.ids = root / "ids"
        self.ids.touch()
        self.ids.chmod(0o666)
        python = root / "python"
        python.write_text(f'#!/bin/sh\necho "$(id -u) $(id -G)" >> {self.ids}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        file = root / "transomd.toml"
        text = file.read_text().replace("[daemon]\n", f'[daemon]\npython = "{python}"\n')
        file.write_text(text.replace("[health]\n", "[health]\ncollective_timeout_s = 30\n"))

    def daemon_argv(self) -> list[str]:
        return [*ONLY_THESE_RIGHTS, *super().daemon_argv()]

    @property
    def url(self) -> str:
        return f"http://10.77.0.254:{(self.root / 'state' / 'port').read_text()}"

    def submit_as(
        self, person: Person, options: str = "", *, nodes: int = 2, spares: int = 1, more: str = "", **env: str
    ) -> int:
        """Submit the ring program as somebody, from that user's home; return the job's id."""
        text = JOB.format(
            python=sys.executable, ring=RING, options=options, nodes=nodes, spares=spares, tasks=1, folder="checkpoints"
        )
        done = self.submit_yaml(person, text + more, **env)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["job"]["id"])

    def submit_yaml(self, person: Person, text: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Submit a job.yaml as somebody."""
        submit = [sys.executable, "-m", "transom_cli.main", "--socket", self.socket, "submit", "-", "--json", *words]
        return person.run(submit, stdin=text, env=env)

    def in_hub(self, script: str, *words: str, stdin: str = "", person: Person | None = None, node: str = "") -> Any:
        """Run Python code where the daemon's network is (or on a node), and return the JSON that it prints last."""
        argv = [sys.executable, "-c", script, *words]
        argv = person.argv(argv) if person else argv
        full = self.sandbox.node_argv(node, argv) if node else self.sandbox.hub_argv(argv)
        done = subprocess.run(full, input=stdin, capture_output=True, text=True, timeout=90, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    def slurm_job(self, job: int) -> dict[str, str]:
        """What Slurm says of a job's current attempt."""
        number = self.job(job)["slurm_job_id"]
        told = self.sandbox.run(["scontrol", "-o", "show", "job", str(number)]).stdout
        return dict(word.split("=", 1) for word in told.split() if "=" in word)
