"""What a person asks for by hand: drain and undrain nodes, and the plan of a submission. Recorded like any act."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from transom_slurm.states import drain_refusal
from transom_slurm.types import SlurmNode, SubmitRequest
from transom_sql.records import Attempt, Intent, Job, NodeRecord

from transomd.api.views import owned
from transomd.errors import UnreachableError
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tee.types import LATEST
from transomd.tol.admit import MANUAL
from transomd.tol.drains import CONFIRM_WITHIN_S
from transomd.tol.facts import first_tag
from transomd.tol.loop import Operator
from transomd.tol.submission import submit_request
from transomd.words import IntentKind, IntentState

Result = dict[str, Any]


class Hands:
    """Acts on behalf of an administrator, one node at a time, each with a result of its own."""

    def __init__(self, operator: Operator, settings: Settings, clock: Callable[[], float], daemon_url: str) -> None:
        self._operator = operator
        self._settings = settings
        self._clock = clock
        self._daemon_url = daemon_url

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings

    def plan(self, job: Job, spec: JobSpec) -> SubmitRequest:
        """Return the sbatch call that a submission would make; job and attempt numbers are not yet given."""
        attempt = Attempt(job_id=0, number=1, tag=first_tag(job), created_at=self._clock())
        return submit_request(job, spec, attempt, self._daemon_url, self._settings, None)

    async def drain(self, names: Iterable[str], reason: str, *, dry_run: bool) -> list[Result]:
        """Drain nodes that nobody else holds; of those that are drained already, say who did it, when and why."""
        nodes, records = await self._nodes(), await self._records()
        return [await self._drain(nodes.get(name), records.get(name), name, reason, dry_run) for name in names]

    async def _drain(
        self, node: SlurmNode | None, record: NodeRecord | None, name: str, reason: str, dry_run: bool
    ) -> Result:
        command = f"scontrol update nodename={name} state=drain reason={reason!r}"
        if node is None:
            return _result(name, False, "Slurm does not know this node", "sinfo -N", missing=True)
        if node.status.drain and owned(node, record):
            said = f"drained already, by transom{_since(node)}: {node.reason}"
            return _result(name, True, said, f"transom undrain {name}")
        if drain_refusal(node):
            return _result(name, False, f"{_held_by(node)}; left as it is", f"scontrol show node {name}")
        if dry_run:
            return _result(name, False, "would be drained", command)
        return await self._carry_out(IntentKind.DRAIN, name, {"reason": reason}, command, "drained")

    async def undrain(self, names: Iterable[str], who: str, *, dry_run: bool) -> list[Result]:
        """Resume nodes whose reason is still exactly as transom wrote it, from DOWN too; nobody else's is undone."""
        nodes, records = await self._nodes(), await self._records()
        return [await self._undrain(nodes.get(n), records.get(n), n, who, dry_run) for n in names]

    async def _undrain(
        self, node: SlurmNode | None, record: NodeRecord | None, name: str, who: str, dry_run: bool
    ) -> Result:
        if node is None:
            return _result(name, False, "Slurm does not know this node", "sinfo -N", missing=True)
        down = node.status.base == "DOWN"
        if not node.status.drain and not down:
            return _result(name, False, "is not drained", "")
        # Slurm brings no DOWN node back by itself whose reason is not its own any more.
        command = f"scontrol update nodename={name} state={'resume' if down else 'undrain'}"
        if record is None or not owned(node, record):
            said = "was drained" if node.status.drain else "was set DOWN"
            by = (
                f"by {node.reason_user or 'somebody'}{_since(node)}, not by transom: {node.reason or 'no reason given'}"
            )
            return _result(name, False, f"{said} {by}; it is left alone", command)
        if dry_run:
            return _result(name, False, f"would be {'resumed' if down else 'undrained'}", command)
        args = {"reason": record.drain_reason, "user": record.drain_user, "time": record.drain_time, "who": who}
        done = "undrained; it was DOWN, and gets work when its slurmd answers" if down else "undrained"
        return await self._carry_out(IntentKind.UNDRAIN, name, args, command, done)

    async def _carry_out(self, kind: IntentKind, name: str, args: Result, command: str, done: str) -> Result:
        intent = Intent(
            key=f"manual-{kind}:{name}:{uuid.uuid4().hex[:12]}",
            kind=kind.value,
            state=IntentState.PENDING.value,
            created_at=self._clock(),
            args={"node": name, "check": MANUAL, **args},
        )
        ended = await self._operator.act_now(intent)
        if ended.state == IntentState.DONE:
            return _result(name, True, done, command)
        error = str(ended.outcome.get("error", "no answer so far"))
        again = f"; tried again for {CONFIRM_WITHIN_S / 60:.0f} min" if kind is IntentKind.DRAIN else "; tried again"
        return _result(name, False, error + (again if ended.state == IntentState.PENDING else ""), command)

    async def _records(self) -> dict[str, NodeRecord]:
        return {r.name: r for r in await self._operator.books.db(self._operator.books.store.nodes)}

    async def _nodes(self) -> dict[str, SlurmNode]:
        slurm = await self._operator.nodes_now()
        if slurm.nodes is None:
            raise UnreachableError(f"Slurm does not answer: {slurm.error or 'not asked yet'}", hint="scontrol ping")
        return dict(slurm.nodes)


def _held_by(node: SlurmNode) -> str:
    if not node.status.drain:
        return drain_refusal(node)
    return f"{node.reason_user or 'somebody'} drained it{_since(node)}: {node.reason or 'no reason given'}"


def _since(node: SlurmNode) -> str:
    """Since when a node's reason stands there, in the daemon's time zone; empty where Slurm does not tell."""
    told = node.reason_time
    return f" on {datetime.fromtimestamp(told):%Y-%m-%d at %H:%M:%S}" if told and 0 < told < LATEST else ""


def _result(node: str, done: bool, message: str, command: str, *, missing: bool = False) -> Result:
    return {"node": node, "done": done, "message": message, "command": command, "missing": missing}
