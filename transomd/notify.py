"""Runs the site's command when a person should look: bounded, with a deadline, beside the loop, never in its way.

The command is the site's own and is given to ``/bin/sh -c`` as it stands; what happened comes as a JSON object on
standard input and in the environment, so that nothing that a user wrote ever becomes part of the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transom_sql.records import Intent, Switch

from transomd.settings import Settings
from transomd.tol.act import Outcome
from transomd.tol.switches import BUDGET, RESUME
from transomd.tol.view import Decision, JobView, SlurmView
from transomd.tol.watchers import Watcher
from transomd.words import IntentKind, IntentState, JobState

log = logging.getLogger("transom.notify")

WAITING = 100
"""Notices that may wait for the command; more are dropped and said."""
SHOWN = 2000
"""Bytes of what the command prints on standard error that are logged when it fails."""
GRACE_S = 0.5
"""How long a pipe is still read after the command has ended: its children may hold it open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that a person should know. ``hint`` is the next command to type."""

    event: str
    at: float
    message: str
    hint: str = ""
    node: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)

    def body(self, cluster: str) -> bytes:
        """Return the JSON object for standard input."""
        told = {"event": self.event, "at": self.at, "cluster": cluster, "message": self.message, "hint": self.hint}
        return json.dumps({**told, "node": self.node or None, "job": dict(self.job) or None}).encode()

    def environment(self, cluster: str) -> dict[str, str]:
        """Return the same in variables."""
        told = {
            "EVENT": self.event,
            "MESSAGE": self.message,
            "HINT": self.hint,
            "CLUSTER": cluster,
            "NODE": self.node,
            "JOB_ID": str(self.job.get("id", "")),
            "JOB_NAME": str(self.job.get("name", "")),
            "JOB_USER": str(self.job.get("user", "")),
            "JOB_STATE": str(self.job.get("state", "")),
        }
        return {f"TRANSOM_{key}": value.replace("\0", "\ufffd") for key, value in told.items()}


class Notifier(Watcher):
    """Turns what the loop does into notices, and hands them to the command one after another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: asyncio.Queue[Notice] = asyncio.Queue(WAITING)
        self._silent_since: float | None = None
        self._silence_told = False
        self.sent: dict[str, int] = {"done": 0, "failed": 0, "dropped": 0}

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings

    def tell(self, notice: Notice) -> None:
        """Queue a notice; one too many is dropped and said."""
        if not self._settings.notify.command:
            return
        try:
            self._waiting.put_nowait(notice)
        except asyncio.QueueFull:
            self.sent["dropped"] += 1
            log.warning("notify.command is behind by %d notices; dropped: %s", WAITING, notice.message)

    async def run(self) -> None:
        """Run the command for each notice, until cancelled."""
        while True:
            notice = await self._waiting.get()
            try:
                failed = await self._run(notice)
            except OSError as error:
                failed = str(error)
            self.sent["failed" if failed else "done"] += 1
            if failed:
                log.error("notify.command failed for %s (%s): %s", notice.event, notice.message, failed)

    async def _run(self, notice: Notice) -> str:
        """Run the command once; return what went wrong."""
        wish, cluster = self._settings.notify, self._settings.daemon.cluster
        # A pipe of our own: asyncio would wait for the end of its own, which a child of the command may hold open.
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                wish.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=theirs,
                env={**os.environ, **notice.environment(cluster)},
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        said = asyncio.create_task(_first(ours))
        try:
            await asyncio.wait_for(_fed(process, notice.body(cluster)), wish.timeout_s)
        except asyncio.TimeoutError:
            return f"it did not end within {wish.timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.wait([said], timeout=GRACE_S)
            said.cancel()
            await asyncio.gather(said, return_exceptions=True)
        if process.returncode == 0:
            return ""
        text = said.result() if not said.cancelled() else ""
        return f"exit code {process.returncode}{': ' + text if text else ''}"

    # --- what a person should know ------------------------------------------------------------------------------

    def recorded(self, view: JobView, decision: Decision, now: float) -> None:
        """A job that was given up, or waits for a person."""
        if decision.state is view.state or decision.state not in (JobState.FAILED, JobState.HELD):
            return
        job = view.job
        told = {"id": job.id, "name": job.name, "user": job.user, "state": decision.state.value, "run_dir": job.run_dir}
        self.tell(
            Notice(
                event=f"job-{decision.state.value}",
                at=now,
                message=f"job {job.id} {job.name} of {job.user} is {decision.state.value}: {decision.reason}",
                hint=f"transom status {job.id}",
                job=told,
            )
        )

    def acted(self, intent: Intent, outcome: Outcome, now: float) -> None:
        """A node that transom drained by itself."""
        if intent.kind != IntentKind.DRAIN or outcome.state is not IntentState.DONE or intent.key.startswith("manual-"):
            return
        node, reason = str(intent.args["node"]), str(intent.args["reason"])
        hint = f"transom history {node}; when it is repaired: transom undrain {node}"
        self.tell(Notice(event="node-drained", at=now, message=f"{node} was drained: {reason}", hint=hint, node=node))

    def switched(self, switch: Switch, now: float) -> None:
        """A drain budget that is used up."""
        if switch.since is not None and switch.name.startswith(BUDGET):
            name = switch.name.removeprefix(BUDGET)
            message = f"nothing is drained any more: drain.{name} is tripped: {switch.reason}"
            self.tell(Notice(event="budget-tripped", at=now, message=message, hint=f"transom doctor; then {RESUME}"))

    def looked(self, slurm: SlurmView, now: float) -> None:
        """Slurm that has not answered for long."""
        if not slurm.error:
            self._silent_since, self._silence_told = None, False
            return
        since = self._silent_since = self._silent_since if self._silent_since is not None else now
        if now - since >= self._settings.notify.slurm_silent_s and not self._silence_told:
            self._silence_told = True
            message = f"Slurm has not answered for {(now - since) / 60:.0f} min: {slurm.error}"
            self.tell(Notice(event="slurm-silent", at=now, message=message, hint="scontrol ping"))


async def _fed(process: asyncio.subprocess.Process, body: bytes) -> None:
    """Give a command its input, if it wants any, and wait for its end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(body)
        await process.stdin.drain()
    process.stdin.close()
    await process.wait()


async def _first(pipe: int) -> str:
    """Read a pipe to its end, or until cancelled; return only its first bytes."""
    stream, kept = asyncio.StreamReader(), b""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0)
    )
    try:
        while data := await stream.read(65536):
            kept = (kept + data)[:SHOWN]
    except asyncio.CancelledError:
        pass
    finally:
        transport.close()
    return " ".join(kept.decode(errors="replace").split())
