"""Ordinary users for tests: real accounts, made before a sandbox and removed after it, and what they do."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_slurm.runner import user_identity
from transom_slurm.types import UserIdentity


@dataclass(frozen=True)
class Person:
    """One account. Its home has mode 0700."""

    name: str
    home: Path

    @property
    def who(self) -> UserIdentity:
        return user_identity(self.name)

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.name).pw_uid

    def env(self, **more: str) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": path, **more}

    def run(
        self, argv: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with this user's rights, outside the sandbox's namespaces."""
        who = self.who
        return subprocess.run(
            list(argv),
            user=who.uid,
            group=who.gid,
            extra_groups=list(who.groups),
            cwd=self.home,
            env=self.env(**(env or {})),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command with this user's rights, for where only a command can be given (``hub``, ``node``)."""
        env = [f"{key}={value}" for key, value in self.env().items()]
        rights = ["setpriv", f"--reuid={self.uid}", f"--regid={self.who.gid}", "--init-groups", "--inh-caps=-all"]
        return [*rights, "--", "env", *env, *argv]

    def transom(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as this user."""
        return self.run([sys.executable, "-m", "transom_cli.main", *words], env=env)

    def ask(self, address: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request to a socket as this user; the status and the answer."""
        script = (
            "import json,sys; from transomd.api.client import _UnixConnection; "
            "c=_UnixConnection(sys.argv[1],30); "
            "c.request(sys.argv[2],sys.argv[3],sys.stdin.read(),{'Host':'x','Content-Type':'application/json'}); "
            "r=c.getresponse(); print(json.dumps([r.status, r.read().decode()]))"
        )
        done = self.run([sys.executable, "-c", script, address, method, path], stdin=json.dumps(body or {}))
        assert done.returncode == 0, done.stderr
        status, text = json.loads(done.stdout)
        try:
            return int(status), json.loads(text)
        except ValueError:
            return int(status), text


@contextmanager
def people(count: int = 2) -> Iterator[list[Person]]:
    """New accounts, each with a group of its own and one supplementary group."""
    made: list[Person] = []
    base = Path(tempfile.mkdtemp(prefix="tpeople-"))
    base.chmod(0o755)
    try:
        for _ in range(count):
            person = Person(f"tr{secrets.token_hex(4)}", base / f"home{len(made)}")
            made.append(person)
            options = ["--no-create-home", f"--home-dir={person.home}", "--shell=/bin/sh", "--user-group"]
            subprocess.run(["useradd", *options, "--groups=games", person.name], check=True, capture_output=True)
            person.home.mkdir(mode=0o700)
            os.chown(person.home, person.uid, person.who.gid)
        yield made
    finally:
        for person in made:
            subprocess.run(["userdel", person.name], check=False, capture_output=True)
        shutil.rmtree(base)
