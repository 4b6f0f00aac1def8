"""What decisions share: reading a view of a job against the snapshot of the world. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from transom_slurm.states import job_waiting
from transom_slurm.statewords import job_ended
from transom_slurm.types import JobBase, SlurmJob
from transom_sql.records import Attempt, Event, Job, Launch

from transomd.api.wire import LauncherReport, LaunchReport
from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tee.types import Evidence
from transomd.tee.wire import read_evidence
from transomd.tol.lingering import seen_late, without_epilog
from transomd.tol.rollback import bound
from transomd.tol.view import Absence, JobView, SlurmView, World, with_data
from transomd.words import IntentState

MANY = 3
"""So many nodes lost in one failure share something, and none of them is drained for it."""
ABSENT_GRACE_S = 60.0
"""How far apart two of Slurm's answers that it does not know a job must be before that is believed.

A controller that restarts may answer so; one that is often away in between must not put it off for ever.
"""
UNSURE_GRACE_S = 900.0
"""The same while accounting, which might know how the job ended, does not answer."""


def first_tag(job: Job) -> str:
    """Return the name of a job's first Slurm job. The id keeps tags apart that users could make alike."""
    return f"{job.name}.tr-{job.id}-{job.token_sha256[:8]}-1"


def submit_key(attempt: Attempt) -> str:
    """Return the key of an attempt's submission."""
    return f"submit:{attempt.job_id}:{attempt.number}"


def cancel_key(attempt: Attempt) -> str:
    """Return the key of an attempt's cancellation by transom."""
    return f"cancel:{attempt.job_id}:{attempt.number}"


def event(view: JobView, now: float, kind: str, message: str, **data: Any) -> Event:
    """Return one line of a job's history."""
    return Event(at=now, kind=kind, message=message, job_id=view.job.id, data=data)


def fitting_report(view: JobView) -> LauncherReport | None:
    """Return the newest report if it comes from the recorded launcher of the recorded attempt."""
    report, attempt = view.report, view.attempt
    if report is None or report.attempt != attempt.number or report.generation < attempt.generation:
        return None
    return report if report.slurm_job_id == attempt.slurm_job_id else None


def ended(job: SlurmJob) -> bool:
    """Whether Slurm says that the job is over for good. transom submits nothing that Slurm may put back by itself."""
    return job_ended(job.status.base.value, job.status.flags, may_requeue=False)


def requeued(job: SlurmJob) -> bool:
    """Whether Slurm put the job back into the queue all the same (``PrologFlags=ForceRequeueOnFail``)."""
    return job.restarts > 0 and job_waiting(job.status)


def suspended(view: JobView, slurm: SlurmView) -> bool:
    """Whether Slurm has stopped the job's processes (``scontrol suspend``, gang scheduling): they keep their nodes."""
    job = slurm.job(view.attempt) if view.attempts else None
    return isinstance(job, SlurmJob) and (job.status.base is JobBase.SUSPENDED or "STOPPED" in job.status.flags)


def slurm_job(view: JobView, world: World, now: float) -> SlurmJob | Absence:
    """Return what Slurm says, as far as it is to be believed.

    That it does not know the job is believed once it says so again after a while, has not said otherwise in between,
    and the launcher is silent as well, or at once after a cancellation that saw the job end. Else it is *unknown*. A
    job whose epilog does not end counts as over after a while, where it is known how it ended.
    """
    job = world.slurm.job(view.attempt)
    if isinstance(job, SlurmJob):
        return without_epilog(job, now, ours=ended_by_us(view, world)) if seen_late(view, job, now) else job
    if job is Absence.UNKNOWN:
        return job
    cancel = view.intent(cancel_key(view.attempt))
    if cancel is not None and cancel.state == IntentState.DONE:
        return job
    since = view.attempt.data.get("absent_since")
    grace = UNSURE_GRACE_S if view.attempt.slurm_job_id in world.slurm.unsure else ABSENT_GRACE_S
    heard = view.report_at if fitting_report(view) is not None else 0.0
    sure = since is not None and now - max(float(since), heard) >= grace
    return job if sure else Absence.UNKNOWN


def ended_by_us(view: JobView, world: World) -> bool:
    """Whether it was transom that cancelled the attempt's Slurm job, and no person."""
    return view.intent(cancel_key(view.attempt)) is not None or overtaken(view, world)


def overtaken(view: JobView, world: World) -> bool:
    """Whether Slurm runs a later attempt of the job than any that is recorded: the database was restored.

    Then it was transom that ended the recorded one, and no person.
    """
    base, number = view.attempt.tag.rsplit("-", 1)[0], view.attempt.number
    later = [job for job in (world.slurm.jobs or {}).values() if job.user == view.job.user and not ended(job)]
    numbers = [job.name.removeprefix(f"{base}-") for job in later if job.name.startswith(f"{base}-")]
    return any(told.isascii() and told.isdigit() and int(told) > number for told in numbers)


def why_unknown(view: JobView, world: World) -> str:
    """Say why nothing is known about the job's Slurm job."""
    if world.slurm.job(view.attempt) is Absence.ABSENT:
        return f"Slurm does not know job {view.attempt.slurm_job_id}; making sure"
    return f"waiting for Slurm to answer{': ' if world.slurm.error else ''}{world.slurm.error}"


def noted(view: JobView, world: World, now: float) -> Attempt | None:
    """Return the attempt with the times since when Slurm does not know it, or ends it, set or cleared.

    None when they are right.
    """
    job, data = world.slurm.job(view.attempt), view.attempt.data
    if view.attempt.slurm_job_id is None or job is Absence.UNKNOWN:
        return None
    completing = isinstance(job, SlurmJob) and "COMPLETING" in job.status.flags
    times = {
        "absent_since": _since(data.get("absent_since"), job is Absence.ABSENT, now),
        "completing_since": _since(data.get("completing_since"), completing, now),
    }
    right = all(data.get(name) == at for name, at in times.items())
    return None if right else with_data(view.attempt, **times)


def _since(noted: Any, holds: bool, now: float) -> Any:
    """Return since when something holds; noted for a time that is still to come (a clock set back), it counts anew."""
    if not holds:
        return None
    return now if noted is None or float(noted) > now + ABSENT_GRACE_S else noted


def last_nodes(view: JobView) -> tuple[str, ...]:
    """Return the nodes of the attempt's last launch, in the launch's order; empty when there was none.

    Only the allocation's count: a launcher's word is the user's.
    """
    here = [launch for launch in view.launches if launch.attempt == view.attempt.number]
    return tuple(n for n in here[-1].nodes if n in view.attempt.nodes) if here else ()


def alive(view: JobView) -> list[str]:
    """Return the allocation's nodes whose agent answers, in the allocation's order."""
    report = fitting_report(view)
    answering = set(report.nodes) if report else set()
    return [n for n in view.attempt.nodes if n in answering]


def probed(world: World, nodes: Iterable[str], since: float) -> dict[str, NodeReport]:
    """Return the probes of these nodes that were begun at ``since`` or later."""
    return {n: world.health[n] for n in nodes if n in world.health and world.health[n].at >= since}


def unfit_words(report: NodeReport) -> str:
    """Say what a probe found."""
    return "; ".join(f"{r.check}: {r.evidence or r.value}" for r in report.unfit)


def unfit(view: JobView, found: Mapping[str, NodeReport]) -> dict[str, str]:
    """Return the allocation's nodes that a probe, or their own agent's look, found unfit, each with the reason."""
    report = fitting_report(view)
    told = {n: why for n, why in report.unfit.items() if n in view.attempt.nodes} if report else {}
    return {**told, **{node: unfit_words(seen) for node, seen in found.items() if seen.unfit}}


def next_epoch(view: JobView) -> int:
    """Return the number of the next launch: above all that were recorded; :func:`absorb` sees to those reported."""
    return max([view.job.epoch, *(launch.epoch for launch in view.launches)]) + 1


def past_step(view: JobView) -> int | None:
    """Return the furthest step that any launch has reached."""
    steps = [launch.last_step for launch in view.launches if launch.last_step is not None]
    return max(steps, default=None)


def ordered(view: JobView, epoch: int, nodes: Iterable[str], now: float) -> Attempt:
    """Return the attempt with the order of a launch, its nodes in the allocation's order (rank 0 is on the first)."""
    chosen = set(nodes)
    placed = [n for n in view.attempt.nodes if n in chosen]
    back = bound(view.job.data)
    order = {"epoch": epoch, "nodes": placed, "resume_step": back, "past_step": past_step(view)}
    return with_data(view.attempt, order=order, ordered_at=now, fence=None)


def absorb(view: JobView) -> tuple[dict[str, Any], tuple[Launch, ...]]:
    """Return what a report adds to the records: changed job fields, and launches that are new or moved on."""
    report = fitting_report(view)
    if report is None:
        return {}, ()
    known = {launch.epoch: launch for launch in view.launches}
    told = tuple(_launch(view, x, known.get(x.epoch)) for x in report.launches)
    moved = tuple(launch for launch in told if known.get(launch.epoch) != launch)
    data = dict(view.job.data)
    if report.checkpoint_step is not None:
        data["checkpoint"] = {
            "step": report.checkpoint_step,
            "epoch": report.checkpoint_epoch,
            "at": report.checkpoint_at,
        }
    if report.checkpoints:
        data["checkpoints"] = [list(checkpoint) for checkpoint in report.checkpoints]
    if report.stages or "stages" in data:
        data["stages"] = [dict(stage) for stage in report.stages]
    for key, said in (
        ("checkpoint_trouble", report.checkpoint_trouble),
        ("checkpoint_skipped", report.checkpoints_skipped),
        ("copies", report.copies),
        ("copies_trouble", report.copies_trouble),
    ):
        if said or key in data:
            data[key] = said
    if report.launches and report.launches[-1].last_step is not None:
        data["step"], data["step_at"] = report.launches[-1].last_step, report.launches[-1].last_step_at
    changes: dict[str, Any] = {} if data == dict(view.job.data) else {"data": data}
    failed = report.failure.epoch if report.failure else 0
    epoch = max([view.job.epoch, failed, *(x.epoch for x in report.launches)])
    if epoch != view.job.epoch:
        changes["epoch"] = epoch
    return changes, moved


def _launch(view: JobView, told: LaunchReport, known: Launch | None) -> Launch:
    return Launch(
        job_id=view.job.id,
        epoch=told.epoch,
        attempt=known.attempt if known else view.attempt.number,
        nodes=tuple(told.nodes),
        started_at=told.started_at,
        ended_at=told.ended_at,
        resume_step=told.resume_step,
        first_step=told.first_step,
        first_step_at=told.first_step_at,
        last_step=told.last_step,
        last_step_at=told.last_step_at,
        end_reason=told.end_reason,
    )


def closed_launches(view: JobView, epoch: int, at: float, reason: str, *, over: bool = False) -> tuple[Launch, ...]:
    """Return the launches up to ``epoch`` that nobody is left to report the end of, as ended.

    ``over``: the allocation is, and its launcher with it; that it reported them as running is its last word then.
    """
    report = None if over else fitting_report(view)
    reported = {x.epoch for x in report.launches} if report else set()
    still = [x for x in view.launches if x.epoch <= epoch and x.ended_at is None and x.epoch not in reported]
    return tuple(replace(x, ended_at=max(at, x.started_at), end_reason=reason) for x in still)


def launcher_silent(view: JobView, world: World, settings: Settings, now: float) -> bool:
    """Whether the launcher has been silent for too long; sooner where Slurm does not hear its node either."""
    if world.deaf and not world.slurm.silent(host_of(view)):
        return False
    return now > silent_at(view, world, settings)


def silent_at(view: JobView, world: World, settings: Settings) -> float:
    """Return when the launcher's silence becomes too long, if it goes on."""
    limit = settings.watch.launcher_silence_s
    if world.slurm.silent(host_of(view)):
        limit = min(limit, 2 * settings.watch.report_s + 2)
    return view.report_at + limit


def host_of(view: JobView) -> str:
    """Return the node of the attempt's launcher; empty before it has reported."""
    return str(view.attempt.data.get("host", ""))


def await_drain(nodes: Iterable[str], health: Mapping[str, NodeReport]) -> dict[str, list[str]]:
    """Return, for each blamed node, the checks that found it unfit; empty where only its silence speaks."""
    return without_many_silent({n: sorted(r.check for r in health[n].unfit) if n in health else [] for n in nodes})


def without_many_silent(waits: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return what :func:`await_drain` does, without those that only went silent where there are many of them."""
    silent = [node for node, checks in waits.items() if not checks]
    return {node: checks for node, checks in waits.items() if checks or len(silent) < MANY}


def readable(items: Iterable[Mapping[str, Any]]) -> Iterator[Evidence]:
    """Read a launcher's evidence. It is the user's own: what cannot be read proves nothing, and stops nothing."""
    for item in items:
        try:
            yield read_evidence(item)
        except ValueError:
            continue
