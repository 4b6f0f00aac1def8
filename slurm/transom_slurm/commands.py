"""The real Slurm through its own commands: ``squeue``, ``scontrol``, ``sacct``, ``sbatch``, ``scancel``; text only.

One process per query whatever the cluster's size, each with a deadline, few at once. ``squeue --json`` is not used: it
lists every job in memory, costs ten times as much, and 22.05 exits 0 without a controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from transom_slurm.batch import sbatch_argv
from transom_slurm.errors import (
    SlurmDenied,
    SlurmError,
    SlurmRejected,
    SlurmUnavailable,
    SlurmUnreadable,
    SubmitAmbiguous,
)
from transom_slurm.parsers import (
    JOB_FIELDS,
    SACCT_FIELDS,
    STEP_FIELDS,
    new_token,
    parse_config,
    parse_nodes,
    parse_reservations,
    parse_sacct,
    parse_squeue,
    parse_steps,
    parse_topology,
    squeue_format,
)
from transom_slurm.runner import CommandError, CommandNotStarted, Completed, Runner, clean_env, run, scrub
from transom_slurm.types import Reservation, SlurmJob, SlurmNode, SlurmStep, SubmitRequest, UserIdentity

UNAVAILABLE: tuple[str, ...] = (
    "unable to contact slurm controller",
    "unable to contact slurm database",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "no route to host",
    "network is unreachable",
    "communications connection failure",
    "communications shutdown failure",
    "communications receive failure",
    "communications send failure",
    "zero bytes were transmitted",
    "insane message length",
    "protocol authentication error",
    "munge",
    "invalid authentication credential",
    "slurm backup controller in standby mode",
    "slurmctld is currently reconfiguring",
    "rpc rate limit",
    "rate limit",
    "resource temporarily unavailable",
    "temporarily unable to accept job",
    "slurm temporarily unable",
    "unspecified error",
    "problem talking to the database",
    "could not establish a configuration source",
    "dns srv lookup failed",
    "invalid job format specification",
    "invalid job step format specification",
)
"""Lower-case pieces of Slurm's messages after which the truth is unknown; a site may add its own."""

DENIED: tuple[str, ...] = (
    "access/permission denied",
    "permission denied",
    "invalid user id",
    "user's group not permitted",
    "only permitted by root user",
)
"""Lower-case pieces of messages by which Slurm refuses a right."""

_SACCT_FIRST_SECOND = 1_000_000  # sacct refuses earlier Unix times
_IDS_IN_A_QUERY = 1000  # an argument of a command has at most 128 KiB


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a command may take. slurmctld's own time-out makes a client wait 9 to 18 s, munge's 49 s."""

    query: float = 20.0
    change: float = 30.0
    submit: float = 60.0


class CommandClient:
    """Implements :class:`~transom_slurm.client.SlurmClient` with Slurm's commands.

    ``env`` is the environment of queries (:func:`~transom_slurm.runner.clean_env`), ``unavailable`` are more pieces of
    messages that mean *unknown*, ``at_once`` bounds the queries that run at the same time, and the
    changes: apart, so that many an sbatch that hangs keeps nobody from looking.
    """

    def __init__(
        self,
        runner: Runner = run,
        *,
        env: Mapping[str, str] | None = None,
        deadlines: Deadlines = Deadlines(),
        unavailable: Collection[str] = (),
        at_once: int = 4,
    ) -> None:
        self._runner = runner
        self._env = dict(env) if env is not None else clean_env()
        self._deadlines = deadlines
        self._unavailable = (*UNAVAILABLE, *(text.lower() for text in unavailable))
        self._asking, self._changing = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)

    async def jobs(self) -> Mapping[int, SlurmJob]:
        token = new_token()
        done = await self._query("squeue", "-h", "-a", "-t", "all", "-O", squeue_format(JOB_FIELDS, token))
        return await asyncio.to_thread(parse_squeue, done.stdout, token)

    async def jobs_of(self, job_ids: Collection[int]) -> Mapping[int, SlurmJob]:
        """These jobs, as far as slurmctld still holds them; SlurmRejected when one alone is asked for and gone."""
        if len(job_ids) > _IDS_IN_A_QUERY:
            return {job_id: job for job_id, job in (await self.jobs()).items() if job_id in job_ids}
        token, ids = new_token(), ",".join(str(job_id) for job_id in sorted(job_ids))
        form = squeue_format(JOB_FIELDS, token)
        return parse_squeue((await self._query("squeue", "-h", "-a", "-t", "all", "-j", ids, "-O", form)).stdout, token)

    async def nodes(self) -> Mapping[str, SlurmNode]:
        done = await self._query("scontrol", "-o", "-a", "show", "nodes")
        return listed_nodes(await asyncio.to_thread(parse_nodes, done.stdout))

    async def finished(self, job_ids: Collection[int], since: float) -> Mapping[int, SlurmJob]:
        if not job_ids:
            return {}
        token = new_token()
        ids = ",".join(str(job_id) for job_id in sorted(job_ids))
        form = (f"--delimiter={token}", f"--format={','.join(SACCT_FIELDS)}")
        start = f"uts{max(int(since), _SACCT_FIRST_SECOND)}"
        try:
            done = await self._query("sacct", "-n", "-X", "-p", *form, "-S", start, "-j", ids)
        except SlurmRejected as error:
            if "accounting storage is disabled" in error.cause.lower():
                return {}
            raise
        return parse_sacct(done.stdout, token)

    async def find(self, name: str) -> Sequence[SlurmJob]:
        # squeue's own --name splits at commas and filters on this side of the wire too.
        return [job for job in (await self.jobs()).values() if job.name == name]

    async def submit(self, request: SubmitRequest) -> int:
        env = self._submit_env(request)
        argv = sbatch_argv(request)
        try:
            done = await self._run(argv, self._deadlines.submit, request.script, env, request.cwd, request.user)
        except CommandNotStarted as error:
            raise SlurmRejected("sbatch", error.cause) from None
        except CommandError as error:
            raise SubmitAmbiguous("sbatch", str(error), hint=f"squeue -a -t all --name={request.name}") from None
        if done.rc == 0 and (job_id := done.stdout.strip().partition(";")[0]).isdigit():
            return int(job_id)
        raise self._submit_failure(done, request)

    async def cancel(self, job_id: int) -> None:
        await self._change("scancel", str(job_id), gone_is_fine=True)

    async def drain(self, node: str, reason: str) -> None:
        if any(ord(char) < 32 for char in reason) or not reason.strip():
            raise SlurmRejected("drain", f"a reason is one line of text, not {reason!r}")
        await self._change("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")

    async def resume(self, node: str, *, down: bool = False) -> None:
        lifted = await self._node(node)
        await self._change("scontrol", "update", f"nodename={node}", f"state={'resume' if down else 'undrain'}")
        if lifted is None or not lifted.reason:
            return
        # Later releases (24.11) leave the reason. Nobody's other words are taken out, nor why a node is DOWN.
        with contextlib.suppress(SlurmError):
            left = await self._node(node)
            if left is not None and not left.status.drain and left.status.base != "DOWN" and _same_words(left, lifted):
                await self._change("scontrol", "update", f"nodename={node}", "reason=")

    async def _node(self, name: str) -> SlurmNode | None:
        try:
            done = await self._query("scontrol", "-o", "-a", "show", "node", name)
        except SlurmRejected:
            return None
        return parse_nodes(done.stdout).get(name)

    async def comment_node(self, node: str, text: str) -> None:
        if any(ord(char) < 32 for char in text):
            raise SlurmRejected("comment_node", f"a comment is one line of text, not {text!r}")
        await self._change("scontrol", "update", f"nodename={node}", f"comment={text}")

    async def update_job(self, job_id: int, fields: Mapping[str, str]) -> None:
        words = [f"{key}={value}" for key, value in fields.items()]
        # A resize leaves a script in the working directory (slurm_job_<id>_resize.sh): let it be a passing one.
        with tempfile.TemporaryDirectory(prefix="transom-") as folder:
            await self._change("scontrol", "update", f"jobid={job_id}", *words, cwd=folder)

    async def config(self) -> Mapping[str, str]:
        return parse_config((await self._query("scontrol", "show", "config")).stdout)

    async def topology(self) -> Mapping[str, tuple[str, ...]]:
        argv = ("scontrol", "-o", "show", "topology")
        return parse_topology((await self._query(*argv, silent_if="no topology information")).stdout)

    async def reservations(self) -> Sequence[Reservation]:
        return parse_reservations((await self._query("scontrol", "-o", "show", "reservations")).stdout)

    async def steps(self, job_id: int) -> Sequence[SlurmStep]:
        token = new_token()
        done = await self._query("squeue", "-h", "-s", "-j", str(job_id), "-O", squeue_format(STEP_FIELDS, token))
        return [s for s in parse_steps(done.stdout, token) if s.step_id.split(".")[0] == str(job_id)]

    async def _run(
        self,
        argv: Sequence[str],
        deadline: float,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: UserIdentity | None = None,
        *,
        turn: asyncio.Semaphore | None = None,
    ) -> Completed:
        async with turn or self._changing:
            return await self._runner(
                argv, stdin=stdin, env=self._env if env is None else env, timeout=deadline, cwd=cwd, user=user
            )

    async def _query(self, *argv: str, silent_if: str | None = None) -> Completed:
        """Run a command that only asks; what it returns is a whole answer.

        ``silent_if`` is a piece of a message by which this command says that there is nothing to list.
        """
        try:
            done = await self._run(argv, self._deadlines.query, turn=self._asking)
        except CommandError as error:
            raise SlurmUnavailable(argv[0], str(error), hint="scontrol ping") from None
        said = done.stderr.strip()
        if silent_if and silent_if in said.lower() and not done.stdout.strip():
            return done
        if done.rc != 0:
            raise self._failure(argv, done)
        if said and (self._says(said, self._unavailable) or ("error" in said.lower() and not done.stdout.strip())):
            raise SlurmUnavailable(argv[0], said, hint="scontrol ping")
        return done

    async def _change(self, *argv: str, gone_is_fine: bool = False, cwd: str | None = None) -> None:
        try:
            done = await self._run(argv, self._deadlines.change, cwd=cwd)
        except CommandError as error:
            raise SlurmUnavailable(" ".join(argv[:3]), str(error), hint="scontrol ping") from None
        if gone_is_fine and "invalid job id" in done.stderr.lower():
            return
        if done.rc != 0 or self._says(done.stderr, (*self._unavailable, *DENIED)):
            raise self._failure(argv, done)

    def _failure(self, argv: Sequence[str], done: Completed) -> SlurmError:
        operation = " ".join(argv[:3]) if argv[0] in ("scontrol", "scancel") else argv[0]
        said = (done.stderr.strip() or done.stdout.strip() or f"{done.end} and no word").replace("\n", "; ")
        if done.rc < 0 and done.end not in said:
            said = f"{done.end}; it had said: {said}"
        if done.rc < 0 or self._says(said, self._unavailable):
            return SlurmUnavailable(operation, said, hint="scontrol ping")
        if self._says(said, DENIED):
            return SlurmDenied(operation, said, hint="sacctmgr show user format=user,adminlevel")
        return SlurmRejected(operation, said)

    def _submit_failure(self, done: Completed, request: SubmitRequest) -> SlurmError:
        """A refusal that sbatch words clearly is a refusal; everything else may hide an accepted job."""
        failure = self._failure(("sbatch",), done)
        if isinstance(failure, SlurmUnavailable) or done.rc == 0:
            hint = f"squeue -a -t all --name={request.name}"
            return SubmitAmbiguous("sbatch", failure.cause, hint=hint)
        return failure

    def _submit_env(self, request: SubmitRequest) -> dict[str, str]:
        """What the job inherits: the request's environment, scrubbed, and what sbatch needs to reach this Slurm."""
        kept: dict[str, str] = {name: self._env[name] for name in ("PATH", "SLURM_CONF") if name in self._env}
        if request.user is not None:
            kept |= {"HOME": request.user.home, "USER": request.user.name, "LOGNAME": request.user.name}
        return kept | scrub(request.env)

    @staticmethod
    def _says(text: str, pieces: Collection[str]) -> bool:
        lowered = text.lower()
        return any(piece in lowered for piece in pieces)


def listed_nodes(nodes: Mapping[str, SlurmNode]) -> Mapping[str, SlurmNode]:
    """Return the nodes. A list without any is no answer: every Slurm that transom serves has some."""
    if not nodes:
        raise SlurmUnreadable("nodes", "Slurm listed no node at all", hint="scontrol show nodes")
    return nodes


def _same_words(node: SlurmNode, other: SlurmNode) -> bool:
    """Whether a reason is the same to the second: the words, who wrote them, and when."""
    return (node.reason, node.reason_user, node.reason_time) == (other.reason, other.reason_user, other.reason_time)
