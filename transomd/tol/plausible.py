"""What of a launcher's report can be true: a pure function. A user may forge all of it, but only about their own job.

Names of nodes outside the allocation are dropped, so that nothing is ever done to them; times are brought between the
start of the attempt and now, since one in the future would be waited for; what a job may have of records is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from transom_slurm.types import SlurmJob

from transomd.api.wire import FailureReport, LauncherReport, LaunchReport
from transomd.tol.view import JobView, World

MAX_LAUNCHES = 2000
"""Launches of one job that are recorded; any policy ends a job long before."""


def plausible(view: JobView, report: LauncherReport, world: World, now: float) -> LauncherReport:
    """Return the report without what cannot be so."""
    known = known_nodes(view, world)
    earliest = min(view.attempt.created_at, now)

    def at(told: float) -> float:
        return min(max(told, earliest), now)

    def maybe_at(told: float | None) -> float | None:
        return None if told is None else at(told)

    failure = report.failure
    return replace(
        report,
        host=report.host if report.host in known else "",
        nodes=_within(report.nodes, known),
        lost=_within(report.lost, known),
        unfit={node: why for node, why in report.unfit.items() if node in known},
        launches=_launches(view, report.launches, known, at, maybe_at),
        failure=_failure(failure, known, at, maybe_at) if failure else None,
        past_failures=[_failure(past, known, at, maybe_at) for past in report.past_failures],
        checkpoint_at=None if report.checkpoint_at is None else min(report.checkpoint_at, now),
    )


def known_nodes(view: JobView, world: World) -> frozenset[str]:
    """The nodes of the current attempt by our records and by Slurm's word; empty until Slurm has said them."""
    job = world.slurm.job(view.attempt)
    return frozenset({*view.attempt.nodes, *(job.nodes if isinstance(job, SlurmJob) else ())})


def _within(names: Iterable[str], known: frozenset[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name in known]


def _launches(
    view: JobView,
    told: list[LaunchReport],
    known: frozenset[str],
    at: Callable[[float], float],
    maybe_at: Callable[[float | None], float | None],
) -> list[LaunchReport]:
    """Keep launches on nodes of the allocation, in the order of their epochs, and new ones while there is room."""
    recorded = {launch.epoch for launch in view.launches}
    full = len(recorded) >= MAX_LAUNCHES
    kept = {}
    for launch in told:
        nodes = _within(launch.nodes, known)
        if nodes and (launch.epoch in recorded or not full):
            kept[launch.epoch] = replace(
                launch,
                nodes=nodes,
                started_at=at(launch.started_at),
                ended_at=maybe_at(launch.ended_at),
                first_step_at=maybe_at(launch.first_step_at),
                new_step_at=maybe_at(launch.new_step_at),
                last_step_at=maybe_at(launch.last_step_at),
            )
    return [kept[epoch] for epoch in sorted(kept)]


def _failure(
    failure: FailureReport,
    known: frozenset[str],
    at: Callable[[float], float],
    maybe_at: Callable[[float | None], float | None],
) -> FailureReport:
    return replace(
        failure,
        detected_at=at(failure.detected_at),
        lost_nodes=_within(failure.lost_nodes, known),
        fenced_at=maybe_at(failure.fenced_at),
        unfenced=_within(failure.unfenced, known),
    )
