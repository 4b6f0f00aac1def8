"""The demo's room: one temporary folder with a sandbox, transomd and the job in it, that goes without a trace."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from transom_slurm.sandbox import Sandbox
from transom_slurm.sandbox.waiting import until

from transomd.api.client import Client
from transomd.errors import TransomError

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples"
PROGRAM = ("train.py", "tinylm.py", "pytext.py")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLURMD_TIMEOUT_S, MESSAGE_TIMEOUT_S = 9, 2
DAEMON_START_S, COMMAND_S = 60.0, 60.0


class Trouble(Exception):
    """The demo cannot go on; the message says why."""


class Interrupted(BaseException):
    """A signal asked the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def interrupt_once() -> None:
    """Let the first signal raise Interrupted wherever the demo is, and all later ones do nothing: they find it leaving.

    Processes that are started from then on ignore them too.
    """

    def leave(number: int, _: FrameType | None) -> None:
        ignore_signals()
        raise Interrupted(number)

    for each in SIGNALS:
        signal.signal(each, leave)


def ignore_signals() -> None:
    """Let nothing but SIGKILL end this process from now on."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


class Room:
    """A folder that is the sandbox's own, so that ``transom sandbox down --dir FOLDER`` ends and removes everything."""

    def __init__(self) -> None:
        # The name is known before anything is there, so that an interruption at any moment finds what to remove.
        self.root = Path(tempfile.gettempdir()).resolve() / f"transom-demo-{secrets.token_hex(2)}"
        self.log = self.root / "transomd.log"
        self.job = self.root / "lm"
        self._scratch = self.root / "tmp"
        self.sandbox: Sandbox | None = None
        self._ours = False
        self._daemon: subprocess.Popen[bytes] | None = None

    def up(self, nodes: int) -> Sandbox:
        """Start the sandbox. Raises SandboxError or Trouble."""
        self._ours = True
        try:
            self.root.mkdir()
        except FileExistsError:
            self._ours = False
            raise Trouble(f"{self.root} is there already; try again") from None
        self.sandbox = Sandbox.up(
            nodes, self.root, slurmd_timeout=SLURMD_TIMEOUT_S, message_timeout=MESSAGE_TIMEOUT_S, mode="netns"
        )
        return self.sandbox

    def put_job(self, text: str) -> None:
        """Put the example's program and a job file into the job's folder."""
        self.job.mkdir()
        self._scratch.mkdir()
        for name in PROGRAM:
            shutil.copy(EXAMPLE / name, self.job)
        (self.job / "job.yaml").write_text(text)

    def env(self) -> dict[str, str]:
        """What ``eval "$(transom sandbox env)"`` sets, in a shell with transom and its Python on the PATH."""
        assert self.sandbox is not None
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        # What the job's libraries put into their temporary folder is to go with the room.
        given = {**os.environ, **self.sandbox.env(), "TMPDIR": str(self._scratch)}
        return {**given, "PATH": f"{self.sandbox.spec.layout.bin}:{path}"}

    def client(self) -> Client:
        """A client of the room's daemon."""
        return Client(self.env()["TRANSOM_SOCKET"], timeout_s=10)

    def start_daemon(self) -> None:
        """Start transomd in the hub; returns when it answers and Slurm answers it. Raises Trouble."""
        with self.log.open("ab") as log:
            self._daemon = subprocess.Popen(
                [self._bin("transomd")],
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
            )
        client = self.client()
        if not until(lambda: self._answers(client), DAEMON_START_S, 0.1):
            raise Trouble(f"transomd did not answer within {DAEMON_START_S:.0f} s")

    def _answers(self, client: Client) -> bool:
        self.check_daemon()
        try:
            return bool(client.get("/v1/daemon")["slurm"]["ok"])
        except TransomError:
            return False

    def check_daemon(self) -> None:
        """Raise Trouble if transomd has ended."""
        if self._daemon is not None and self._daemon.poll() is not None:
            raise Trouble(f"transomd ended with exit code {self._daemon.returncode}")

    def _bin(self, word: str) -> str:
        assert self.sandbox is not None
        return str(self.sandbox.spec.layout.bin / word)

    def transom(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run ``transom WORDS`` as a person in the job's folder would; return what it prints. Raises Trouble."""
        done = self._run([self._bin("transom"), *words], {**self.env(), **(env or {})})
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise Trouble(f"transom {' '.join(words)}: exit code {done.returncode}\n{said}")
        return done.stdout

    def _run(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env=env,
            cwd=self.job,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            start_new_session=True,
            check=False,
        )

    def close(self) -> None:
        """End and remove everything. Raises SandboxError or OSError when something stays."""
        if not self._ours:
            return
        self._end_daemon()
        if self.root.exists():
            Sandbox.clear(self.root)
        if self.root.exists():
            shutil.rmtree(self.root)

    def _end_daemon(self) -> None:
        if self._daemon is None or self._daemon.poll() is not None:
            return
        self._daemon.terminate()
        try:
            self._daemon.wait(5)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()

    def keep_logs(self) -> Path:
        """Copy all logs to a folder that stays, and return it."""
        kept = Path(tempfile.mkdtemp(prefix=f"{self.root.name}-logs-", dir=self.root.parent))
        for source in (self.log, *self.root.glob("log/*.log"), *self.job.glob(".transom/*/logs/**/*.log")):
            target = kept / source.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy(source, target)
        return kept
