"""The agent's keeper of checkpoints: started with the agent, started again when it dies, given time at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from transomd.launch.ports import free_port
from transomd.launch.rundir import RunDir
from transomd.tce.memory.place import job_socket, on_node
from transomd.tce.rate import REPLICA, STORAGE

log = logging.getLogger("transom.agent")

AGAIN_S, LONGEST_AGAIN_S = 0.2, 10.0
END_S = 25.0
"""How long a keeper may take to bring to storage what is only in memory; Slurm's KillWait is 30 s by default."""
STATUS_S = 5.0
TELL_AGAIN_S = 0.2
"""How soon a keeper that does not listen yet is told again who else is there."""


class Keeping:
    """Keeps a keeper running as a child of this process, in the agent's own step: it outlives the program."""

    def __init__(self, run_dir: Path, slurm_job_id: str) -> None:
        self.path = on_node(job_socket(run_dir, slurm_job_id))
        self.port = free_port()
        self._token_file = RunDir(run_dir).token_file
        self._env = {**os.environ, **_rates(RunDir(run_dir).spec())}
        self._peers: dict[str, Any] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a keeper, and another one whenever it has ended."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        pause = AGAIN_S
        while True:
            begun = asyncio.get_running_loop().time()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "transomd.tce.keeper", f"--socket={self.path}", "--stay"),
                    *(f"--token-file={self._token_file}", f"--port={self.port}"),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=self._env,
                )
                self._tell()
                code = await self._process.wait()
                log.warning("the keeper of checkpoints ended with exit code %d; starting it again", code)
            except OSError as error:
                log.warning("the keeper of checkpoints cannot be started: %s", error)
            lived = asyncio.get_running_loop().time() - begun
            pause = AGAIN_S if lived > LONGEST_AGAIN_S else min(2 * pause, LONGEST_AGAIN_S)
            await asyncio.sleep(pause)

    async def end(self, within_s: float = END_S) -> bool:
        """Let it bring everything to storage, and end; whether it did in time. No other one is started."""
        for task in (self._task, self._telling):
            if task is not None:
                task.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), within_s)
        except asyncio.TimeoutError:
            log.warning("the keeper of checkpoints was not done after %.0f s", within_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return False
        return True

    def meet(self, peers: dict[str, Any]) -> None:
        """Tell the keeper, and each one after it, who else is there (see ``transomd.tce.replicate.office.Office``)."""
        self._peers = peers
        self._tell()

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        if self._peers is not None:
            self._telling = asyncio.create_task(self._tell_until_heard({"op": "peers", **self._peers}))

    async def _tell_until_heard(self, message: dict[str, Any]) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                await asyncio.to_thread(self._ask, message)
                return
            await asyncio.sleep(TELL_AGAIN_S)

    def status(self) -> dict[str, Any]:
        """What the keeper holds (see ``transomd.tce.memory.desk.Desk.status``). Raises OSError or ValueError."""
        return self._ask({"op": "status"})

    def keep(self, steps: list[list[int]], aim: list[int] | None) -> None:
        """Have it keep the copies of these steps, and copy the first from ``aim`` on. Raises OSError, ValueError."""
        self._ask({"op": "keep", "steps": steps, "aim": aim})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(STATUS_S)
            sock.connect(str(self.path))
            sock.sendall(json.dumps(message).encode() + b"\n")
            with sock.makefile("rb") as answer:
                told: dict[str, Any] = json.loads(answer.readline())
        return told


def _rates(spec: dict[str, Any]) -> dict[str, str]:
    """What a job's file says of its checkpoints' rates, as the keeper reads it; one of an earlier version says none."""
    told = {name: spec["checkpoint"].get(key) for name, key in ((STORAGE, "storage_rate"), (REPLICA, "replica_rate"))}
    return {name: str(rate) for name, rate in told.items() if rate}
