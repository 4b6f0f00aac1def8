"""Carrying out intents. Every act looks first at what is so already, so that doing it twice is the same as once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transom_slurm.client import SlurmClient
from transom_slurm.errors import SlurmDenied, SlurmError, SlurmRejected, SlurmUnavailable
from transom_slurm.states import DrainRecord, drain_refusal, reason_is_own
from transom_slurm.types import SlurmNode, SubmitRequest
from transom_sql.records import Event, Intent, NodeRecord

from transomd.settings import Settings
from transomd.tol.admit import MANUAL
from transomd.tol.clearings import KEY
from transomd.tol.drains import CONFIRM_WITHIN_S, NODE_LOSS
from transomd.tol.facts import ended
from transomd.tol.findings import comment_refusal, fell_to_our_prolog
from transomd.tol.lingering import without_epilog
from transomd.tol.view import JobView
from transomd.words import IntentKind, IntentState

log = logging.getLogger("transom.act")

RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds until an act is tried again after Slurm did not answer; the last one for all later tries."""
TRIES_IN_NODES = 3
"""Tries of an act inside nodes: another node, or leaving one out, does as well."""

FRESH_S = 3.0
"""Age up to which a submission was certainly not begun before, by a daemon that was killed."""
SETTLE_S = 3.0
"""How long slurmctld, when it answers again, may take to act on an sbatch that it had not read before."""
REFUSED_FOR_S, REFUSED_AGAIN_S = 86400.0, 60.0
"""How long, and how often, an attempt is offered again that Slurm refuses of a job which it took before: a limit of the
user's that is reached, or a partition that is closed, passes."""


class Reach(Protocol):
    """The acts that are not Slurm's: they touch nodes, or run something as a user."""

    async def fence(self, nodes: list[str], job_id: int, epoch: int) -> Mapping[str, str]:
        """End a job's processes of launches up to ``epoch`` on nodes; one word or error a node: ``fenced``, ..."""
        ...

    async def start_launcher(self, view: JobView, host: str, generation: int) -> None:
        """Start a launcher inside the allocation, as the job's user, that outlives this process."""
        ...

    def submission(self, view: JobView, attempt: int) -> SubmitRequest:
        """Return the sbatch call of an attempt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an act ended. ``again_s`` not None: not settled, try again in so many seconds."""

    state: IntentState
    data: Mapping[str, Any] = field(default_factory=dict)
    again_s: float | None = None
    events: tuple[Event, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()


class Actor:
    """Performs one intent at a time for each key; the caller records the outcome."""

    def __init__(self, slurm: SlurmClient, reach: Reach, settings: Settings, clock: Callable[[], float]) -> None:
        self._slurm = slurm
        self._reach = reach
        self._settings = settings
        self._clock = clock
        self._since = clock()
        self._looked: set[str] = set()

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings

    async def perform(self, intent: Intent, view: JobView | None) -> Outcome:
        """Carry out an intent; never raises."""
        try:
            return await self._do(intent, view)
        except SlurmUnavailable as error:
            return self._later(intent, str(error))
        except SlurmError as error:
            # An allocation that is to end must end: there is nothing else to do about it than to go on trying.
            again = intent.kind == IntentKind.CANCEL
            return self._later(intent, str(error)) if again else _failed(str(error), error.hint)
        except Exception as error:
            log.exception("%s failed", intent.key)
            words = f"{type(error).__name__}: {error}"
            inside = intent.kind in (IntentKind.LAUNCHER, IntentKind.FENCE)
            return _failed(words) if inside and intent.tries + 1 >= TRIES_IN_NODES else self._later(intent, words)

    def _later(self, intent: Intent, error: str) -> Outcome:
        wait = RETRY_S[min(intent.tries, len(RETRY_S) - 1)]
        return Outcome(state=IntentState.PENDING, data={"error": error}, again_s=wait)

    async def _do(self, intent: Intent, view: JobView | None) -> Outcome:
        kind = IntentKind(intent.kind)
        if kind is IntentKind.DRAIN:
            return await self._drain(intent)
        if kind is IntentKind.UNDRAIN:
            return await self._undrain(intent)
        if kind is IntentKind.CANCEL:
            return await self._cancel(intent, view)
        if kind is IntentKind.COMMENT:
            return await self._comment(intent)
        if view is None:
            return _failed("its job is not known")
        if kind is IntentKind.SUBMIT:
            return await self._submit(intent, view)
        if kind is IntentKind.LAUNCHER:
            await self._reach.start_launcher(view, str(intent.args["host"]), int(intent.args["generation"]))
            return Outcome(state=IntentState.DONE)
        if kind is IntentKind.FENCE:
            return await self._fence(intent)
        return _failed(f"nothing carries out {intent.kind!r}")

    async def _submit(self, intent: Intent, view: JobView) -> Outcome:
        # Anybody may give a job this name; what another user submitted is never ours.
        found = [job for job in await self._slurm.find(str(intent.args["tag"])) if job.user == view.job.user]
        if found:
            # The first one that still lives claims the attempt; a second would be turned away at the gate.
            first = min(found, key=lambda job: (ended(job), job.job_id))
            self._looked.discard(intent.key)
            return _submitted(first.job_id, first.submit_time)
        if self._may_be_coming(intent):
            kept = intent.outcome if "refused" in intent.outcome else {}
            return Outcome(state=IntentState.PENDING, data={**kept, "looked_at": self._clock()}, again_s=SETTLE_S)
        if view.job.cancel_requested_by:
            return _failed("it was cancelled before Slurm took it")
        request = self._reach.submission(view, int(intent.args["attempt"]))
        try:
            number = await self._slurm.submit(request)
        except (SlurmRejected, SlurmDenied) as error:
            if int(intent.args["attempt"]) == 1 or self._clock() - intent.created_at > REFUSED_FOR_S:
                return _failed(error.cause, error.hint)
            told = {"refused": True, "error": error.cause, "without": list(view.attempt.excluded)}
            return Outcome(state=IntentState.PENDING, data=told, again_s=REFUSED_AGAIN_S)
        self._looked.discard(intent.key)
        return _submitted(number, self._clock())

    def _may_be_coming(self, intent: Intent) -> bool:
        """Whether an earlier sbatch may still lie before slurmctld unread: then look once more, a little later.

        What an earlier daemon recorded it may have begun, and begun again after it had looked.
        """
        begun = intent.tries > 0 or self._clock() - intent.created_at > FRESH_S or intent.created_at < self._since
        looked = "looked_at" in intent.outcome and intent.key in self._looked
        self._looked.add(intent.key)
        return begun and not looked

    async def _cancel(self, intent: Intent, view: JobView | None) -> Outcome:
        """End a Slurm job; done when Slurm says that it is over."""
        job_id = int(intent.args["slurm_job_id"])
        if await self._over(job_id, intent, view):
            return Outcome(state=IntentState.DONE, data={"said": "it was over already"})
        await self._slurm.cancel(job_id)
        if await self._over(job_id, intent, view):
            return Outcome(state=IntentState.DONE, data={"said": f"scancel {job_id}"})
        return self._later(intent, "")

    async def _over(self, job_id: int, intent: Intent, view: JobView | None) -> bool:
        job = (await self._slurm.jobs()).get(job_id)
        if job is None or job.name != intent.args["tag"]:
            return True
        # A job whose epilog does not end was ended: another scancel does nothing about it.
        if ended(without_epilog(job, self._clock(), ours=True)):
            return True
        return view is not None and job.user != view.job.user

    async def _fence(self, intent: Intent) -> Outcome:
        args = intent.args
        words = await self._reach.fence(list(args["nodes"]), int(args["job_id"]), int(args["epoch"]))
        return Outcome(state=IntentState.DONE, data={"nodes": dict(words)})

    async def _drain(self, intent: Intent) -> Outcome:
        name, reason = str(intent.args["node"]), str(intent.args["reason"])
        before = (await self._slurm.nodes()).get(name)
        if before is None:
            return _failed(f"Slurm does not know node {name}")
        if before.status.drain and before.reason in (reason, intent.args.get("reason_over")):
            return self._drained(intent, before)
        if fell_to_our_prolog(before, intent.args):
            reason = str(intent.args["reason_over"])
        elif drain_refusal(before):
            return _failed(f"{drain_refusal(before)}; left as it is")
        if outdated := self._outdated(intent, before):
            return _failed(outdated)
        if self.kill_switch():
            # Whoever asked for it by hand is told so, and must not find the node drained on another day.
            manual = intent.args.get("check") == MANUAL
            return _failed(self.kill_switch()) if manual else self._later(intent, self.kill_switch())
        await self._slurm.drain(name, reason)
        after = (await self._slurm.nodes()).get(name)
        if after is None or not after.status.drain or after.reason != reason:
            return self._later(intent, f"{name} does not show the drain yet")
        return self._drained(intent, after)

    def _outdated(self, intent: Intent, node: SlurmNode) -> str:
        """Say why what called for a drain may no longer be so (a lost node is back, or it is long past); else empty."""
        if intent.args.get("check") == NODE_LOSS:
            back = node.status.base != "DOWN"
            return f"{node.name} is {node.state_text} by now, and no newer evidence speaks against it" if back else ""
        age = self._clock() - intent.created_at
        return f"it was called for {age / 60:.0f} min ago and could not be done since" if age > CONFIRM_WITHIN_S else ""

    async def _comment(self, intent: Intent) -> Outcome:
        name, text = str(intent.args["node"]), str(intent.args["text"])
        node = (await self._slurm.nodes()).get(name)
        if node is None:
            return _failed(f"Slurm does not know node {name}")
        if comment_refusal(node):
            return _failed(f"{comment_refusal(node)}; left as it is")
        if node.comment != text:
            await self._slurm.comment_node(name, text)
        said = f"{name}: {text}" if text else f"{name}: comment taken out"
        return Outcome(
            state=IntentState.DONE, events=(Event(at=self._clock(), kind="comment", node=name, message=said),)
        )

    async def _undrain(self, intent: Intent) -> Outcome:
        """Resume a node, drained or DOWN, if what its reason says is still exactly what ``args`` holds."""
        name, args = str(intent.args["node"]), intent.args
        node = (await self._slurm.nodes()).get(name)
        if node is None:
            return _failed(f"Slurm does not know node {name}")
        own = reason_is_own(node, DrainRecord(str(args["reason"]), str(args["user"]), float(args["time"])))
        down = node.status.base == "DOWN" and own
        if node.status.drain and not own:
            return _failed(f"the drain of {name} is no longer transom's: {node.reason_user}: {node.reason}")
        if node.status.drain or down:
            await self._slurm.resume(name, down=down)
        now = self._clock()
        said = Event(at=now, kind="undrained", node=name, message=f"{name} undrained by {args['who']}")
        back = NodeRecord(name=name, changed_at=now, data={KEY: now})
        return Outcome(state=IntentState.DONE, events=(said,), nodes=(back,))

    def kill_switch(self) -> str:
        """Return why nothing may be drained now, read live; empty when it may."""
        if self._settings.personal:
            return "a transomd of one's own drains no nodes"
        path = self._settings.drain.kill_switch
        return f"the kill switch {path} is set" if path and Path(path).exists() else ""

    def _drained(self, intent: Intent, node: SlurmNode) -> Outcome:
        now = self._clock()
        record = NodeRecord(
            name=node.name,
            changed_at=now,
            drain_reason=node.reason,
            drain_user=node.reason_user,
            drain_time=node.reason_time,
            incident_id=intent.incident_id,
        )
        said = Event(
            at=now, kind="drained", node=node.name, job_id=intent.job_id, message=f"{node.name}: {node.reason}"
        )
        return Outcome(state=IntentState.DONE, data={"node": node.name}, events=(said,), nodes=(record,))


def _submitted(job_id: int, at: float | None) -> Outcome:
    return Outcome(state=IntentState.DONE, data={"slurm_job_id": job_id, "submit_time": at})


def _failed(error: str, hint: str = "") -> Outcome:
    return Outcome(state=IntentState.FAILED, data={"error": error, "hint": hint})
