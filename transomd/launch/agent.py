"""The agent: one a node, a Slurm step of its own, that outlives the program, the launcher and the loss of other nodes.

It dials the launcher that ``launcher.json`` names (another one after that launcher is gone), beats, and does what it is
told about this node's processes. One JSON object a line. It also runs the node's
keeper of checkpoints. Hardly more than the standard library: it must start at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from transomd.launch.handshake import greet
from transomd.launch.keeping import Keeping
from transomd.launch.ports import free_port
from transomd.launch.ranks import find_ranks, kill_ranks
from transomd.launch.rundir import RunDir
from transomd.tce.replicate.partners import failure_domain

REDIAL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
LOOK_S = 1.0
COPIES = ("partner", "no_partner", "replica_problem", "keeps", "aim", "copies")
"""What is told of a keeper's status beside its ranks."""
PROBE = Path(__file__).parent.parent / "health" / "probe.py"
LINE_LIMIT = 4 * 1024 * 1024


class Agent:
    """The node's end of the line."""

    def __init__(self, run_dir: RunDir, job_id: int, node: str, heartbeat_s: float) -> None:
        self.run_dir = run_dir
        self.job_id = job_id
        self.node = node
        self.heartbeat_s = heartbeat_s
        self.slurm_job_id = os.environ.get("SLURM_JOB_ID", "")
        self._jobs: set[asyncio.Task[None]] = set()
        self._keeping = Keeping(run_dir.root, self.slurm_job_id)
        self._ranks: list[dict[str, Any]] = []
        self._copies: dict[str, Any] = {}

    async def run(self) -> None:
        """Serve launchers one after another, for as long as the allocation lasts (Slurm then sends SIGTERM).

        Where Slurm could not end it (a cut cable), it ends itself when the job has another allocation.
        """
        self._keeping.start()
        looking = asyncio.create_task(self._look_at_checkpoints())
        try:
            await self._serve_launchers()
        finally:
            looking.cancel()
            await self._keeping.end()

    async def _serve_launchers(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                where = json.loads(self.run_dir.launcher_file.read_text())
                if str(where.get("slurm_job_id", self.slurm_job_id)) != self.slurm_job_id:
                    return
                await self._serve(await self._dial(where))
            await asyncio.sleep(REDIAL_S)

    async def _dial(self, where: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        dial = asyncio.open_connection(where["host"], where["port"], limit=LINE_LIMIT)
        return await asyncio.wait_for(dial, CONNECT_TIMEOUT_S)

    async def _serve(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        reader, writer = streams
        _notice_dead_peers(writer)
        beats: asyncio.Task[None] | None = None
        try:
            await greet(reader, writer, self.run_dir.token(), self.node, os.getpid())
            beats = asyncio.create_task(self._beat(writer))
            while line := await reader.readline():
                self._spawn(writer, json.loads(line))
        finally:
            if beats is not None:
                beats.cancel()
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._send(writer, {"t": "beat", "checkpoints": self._ranks, "copies": self._copies})
            await writer.drain()
            await asyncio.sleep(self.heartbeat_s)

    async def _look_at_checkpoints(self) -> None:
        """Keep what the beats say of this node's checkpoints; a keeper that does not answer says nothing."""
        while True:
            try:
                told = await asyncio.to_thread(self._keeping.status)
                self._ranks, self._copies = list(told["ranks"]), {name: told[name] for name in COPIES}
            except (OSError, ValueError, KeyError):
                self._ranks, self._copies = [], {}
            await asyncio.sleep(max(self.heartbeat_s, LOOK_S))

    def _spawn(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        task = asyncio.create_task(self._answer(writer, request))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _answer(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        try:
            data, error = await self._do(request), ""
        except Exception as problem:  # told to the launcher, which decides
            data, error = None, f"{type(problem).__name__}: {problem}"
        with contextlib.suppress(OSError):
            self._send(writer, {"t": "reply", "id": request.get("id"), "data": data, "error": error})
            await writer.drain()

    async def _do(self, request: dict[str, Any]) -> Any:
        what = request["what"]
        if what == "ranks":
            return [p.to_json() for p in await asyncio.to_thread(find_ranks, self.job_id)]
        if what == "kill":
            epoch, grace = int(request["epoch"]), float(request.get("grace_s", 0))
            left = await asyncio.to_thread(kill_ranks, self.job_id, epoch, grace_s=grace, deadline_s=grace + 8)
            return [p.to_json() for p in left]
        if what == "port":
            return free_port()
        if what == "checkpoints":
            return await asyncio.to_thread(self._keeping.status)
        if what == "keeper":
            return await self._keeper()
        if what == "unstored":
            there, status = await self._asked_keeper()
            return {"there": there, **status}
        if what == "peers":
            return self._keeping.meet({key: request[key] for key in ("epoch", "me", "partner", "keepers")})
        if what == "keep":
            return await asyncio.to_thread(self._keeping.keep, request["steps"], request["aim"])
        if what == "flush":
            return await self._keeping.end(float(request["within_s"]))
        if what == "probe":
            return await _probe(dict(request.get("options", {})))
        raise ValueError(f"unknown request {what!r}")

    async def _keeper(self) -> dict[str, Any]:
        """Where the keeper listens, also when it is only about to, and whether it is ``there``, slow as it may be."""
        there, status = await self._asked_keeper()
        ranks = {int(each["rank"]) for each in [*status.get("ranks", ()), *status.get("copies", ())]}
        port = int(status.get("port", self._keeping.port))
        return {"port": port, "ranks": sorted(ranks), "domain": failure_domain(), "there": there}

    async def _asked_keeper(self) -> tuple[bool, dict[str, Any]]:
        """Whether a keeper is there, and what it says; one that is slow says nothing."""
        try:
            return True, await asyncio.to_thread(self._keeping.status)
        except (ConnectionRefusedError, FileNotFoundError):
            return False, {}
        except (OSError, ValueError):
            return True, {}

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")


def _notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """Let the kernel give up soon on a launcher whose node lost power: it sends no end of the connection."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)


async def _probe(options: dict[str, Any]) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROBE), json.dumps(options), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 15)
    return json.loads(out)


def main(argv: list[str] | None = None) -> int:
    """Run the agent until Slurm ends it."""
    parser = argparse.ArgumentParser(prog="transom-agent")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--heartbeat", type=float, default=1.0)
    options = parser.parse_args(argv)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    agent = Agent(RunDir(options.run_dir), options.job, node, options.heartbeat)
    loop = asyncio.new_event_loop()
    task = loop.create_task(agent.run())
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        loop.run_until_complete(task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
