"""The worker of :mod:`.pyslurm_client`: started when asked, killed at its deadline, started again when asked next."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transom_slurm import pyslurm_worker
from transom_slurm.errors import SlurmUnavailable
from transom_slurm.runner import OUTPUT_LIMIT

RECYCLE_AFTER = 1000
"""Questions after which a worker is replaced: it read slurm.conf but once, and its memory is not ours to answer for."""
_KILL_WAIT_S = 2.0
_LAST_WORDS = 2000


class WorkerLost(SlurmUnavailable):
    """The worker crashed while it was asked, or was killed at its deadline: no answer, so nothing is known."""


class PyslurmFault(Exception):
    """pyslurm cannot be used, or cannot read what Slurm said; the text is a cause. Slurm itself may be well."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself: pyslurm's version, and what it can be asked."""

    version: str
    verbs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer, as :mod:`.pyslurm_worker` names its fields, and the ids of the records that pyslurm could not read."""

    rows: list[list[Any]]
    unread: list[Any]


def worker_argv(python: str = "") -> tuple[str, ...]:
    """The command that is the worker, under the interpreter that has pyslurm (empty: this one)."""
    # -I: neither this folder (its types.py would be found before Python's) nor the caller's PYTHONPATH.
    return (python or sys.executable, "-I", str(Path(pyslurm_worker.__file__).resolve()))


class WorkerProcess:
    """One worker at a time, one question at a time, ``deadline_s`` seconds for each, the start included."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], deadline_s: float) -> None:
        self._argv, self._env, self._deadline_s = tuple(argv), dict(env), deadline_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._hello: Hello | None = None
        self._errors: IO[bytes] | None = None
        self._last_words = ""
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self._process.pid if self._process else None

    async def hello(self) -> Hello:
        """Start the worker if none runs. Raises PyslurmFault (pyslurm is not usable) and WorkerLost."""
        async with self._turn:
            hello: Hello = await self._within("start", self._started())
            return hello

    async def ask(self, verb: str) -> Rows:
        """The answer to one question. Raises SlurmUnavailable (WorkerLost among them) and PyslurmFault."""
        async with self._turn:
            answer = await self._within(verb, self._exchange(verb))
        if "error" not in answer:
            return Rows(answer["rows"], answer["unread"])
        if answer["slurm"]:
            raise SlurmUnavailable(f"pyslurm {verb}", answer["error"], hint="scontrol ping")
        raise PyslurmFault(f"reading {verb} failed: {answer['error']}")

    async def close(self) -> None:
        """End the worker, if one runs."""
        process, self._process, self._hello = self._process, None, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.TimeoutError, BrokenPipeError, ConnectionResetError):
                await asyncio.wait_for(process.communicate(), _KILL_WAIT_S)
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_WORDS))
            self._last_words = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            errors.close()

    async def _within(self, verb: str, work: Any) -> Any:
        try:
            return await asyncio.wait_for(work, self._deadline_s)
        except asyncio.TimeoutError:
            await self.close()
            cause = f"no answer within {self._deadline_s:g} s; its worker was killed"
            raise WorkerLost(f"pyslurm {verb}", cause, hint="scontrol ping") from None
        except asyncio.CancelledError:
            # The answer is still to come, and would be taken for the next one's.
            await self.close()
            raise

    async def _exchange(self, verb: str) -> dict[str, Any]:
        await self._started()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps({"ask": verb}).encode() + b"\n")
            await self._process.stdin.drain()
        answer = await self._line(verb)
        self._asked += 1
        if "error" in answer or self._asked >= RECYCLE_AFTER:
            # Slurm's library keeps what it read of slurm.conf; a new process reads it again.
            await self.close()
        return answer

    async def _started(self) -> Hello:
        if self._hello is not None:
            return self._hello
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env=self._env,
                cwd="/",
                start_new_session=True,
                limit=OUTPUT_LIMIT,
            )
        except OSError as error:
            await self.close()
            raise PyslurmFault(f"{self._argv[0]} cannot be started: {error.strerror}") from None
        self._asked = 0
        try:
            said = await self._line("start")
        except WorkerLost as lost:
            # A library of another Slurm crashes, and one without a usable slurm.conf leaves: commands may still work.
            said = {"error": lost.cause}
        if "error" in said:
            await self.close()
            raise PyslurmFault(f"pyslurm does not import in {self._argv[-3]} ({said['error']})")
        self._hello = Hello(said["pyslurm"], frozenset(said["verbs"]))
        return self._hello

    async def _line(self, verb: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = await process.stdout.readline()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = await asyncio.to_thread(json.loads, line)
            return answer
        await self.close()
        raise WorkerLost(f"pyslurm {verb}", f"its worker {self._ending(process.returncode)}", hint="scontrol ping")

    def _ending(self, rc: int | None) -> str:
        how = f"was killed by {signal.Signals(-rc).name}" if rc is not None and rc < 0 else f"ended with {rc}"
        return f"{how}: {self._last_words}" if self._last_words else how
