"""What ``transom doctor`` is told of the daemon: whether Slurm answers it, and what is stopped, stuck or waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from transom_sql.records import Intent

from transomd.doctor import Finding
from transomd.settings import Settings
from transomd.tol.loop import Operator
from transomd.tol.switches import PAUSE, RESUME
from transomd.tol.view import JobView, SlurmView
from transomd.words import JobState, Level

STUCK_S = 600.0
"""After how long an act that is not done is worth a look."""


def standing(operator: Operator, settings: Settings, pending: Sequence[Intent], now: float) -> list[Finding]:
    """Return a finding or more on each of: Slurm, what is stopped, the jobs, and the ``pending`` acts."""
    return [
        *_slurm(operator.world().slurm, now),
        *_switches(operator, settings),
        *_jobs(operator.views().values()),
        *_acts(operator, pending, now),
    ]


def _slurm(slurm: SlurmView, now: float) -> list[Finding]:
    at = min(slurm.jobs_at, slurm.nodes_at)
    age = f"{now - at:.0f} s ago" if at else "never"
    if slurm.error:
        said = f"Slurm does not answer the daemon (last answer {age}): {slurm.error}"
        return [Finding(section="daemon", level=Level.PROBLEM, text=said, next="scontrol ping")]
    if not at:
        said = "Slurm has not been asked yet"
        return [Finding(section="daemon", level=Level.UNKNOWN, text=said, next="transom doctor")]
    return [Finding(section="daemon", level=Level.OK, text=f"Slurm answered the daemon {age}")]


def _switches(operator: Operator, settings: Settings) -> list[Finding]:
    told = []
    for name, switch in operator.switches.items():
        if switch.since is None:
            continue
        said = operator.paused if name == PAUSE else f"{name} is tripped: {switch.reason}; nothing is drained"
        told.append(Finding(section="daemon", level=Level.PROBLEM, text=said, next=RESUME))
    for job, why in sorted(operator.all_withheld().items()):
        told.append(Finding(section="daemon", level=Level.NOTE, text=f"job {job}: would {why}", next=RESUME))
    file = settings.drain.kill_switch
    if file and Path(file).exists():
        said = f"nothing is drained: the kill switch {file} is set"
        told.append(Finding(section="daemon", level=Level.PROBLEM, text=said, next=f"rm {file}"))
    return told or [Finding(section="daemon", level=Level.OK, text="acts are not paused, no budget is tripped")]


def _jobs(views: Iterable[JobView]) -> list[Finding]:
    known = list(views)
    told = []
    for view in (view for view in known if view.state is JobState.HELD):
        said = f"job {view.job.id} {view.job.name} waits for a person: {view.job.reason}"
        told.append(Finding(section="jobs", level=Level.PROBLEM, text=said, next=f"transom status {view.job.id}"))
    said = f"{len(known)} active job{'' if len(known) == 1 else 's'}, none waits for a person"
    return told or [Finding(section="jobs", level=Level.OK, text=said)]


def _acts(operator: Operator, pending: Sequence[Intent], now: float) -> list[Finding]:
    stuck = [i for i in pending if now - max(i.created_at, i.not_before if not i.tries else 0.0) > STUCK_S]
    if not stuck or operator.paused:
        said = f"{len(pending)} act{'' if len(pending) == 1 else 's'} under way, none is stuck"
        return [Finding(section="daemon", level=Level.OK, text=said)]
    return [_stuck(intent, now) for intent in stuck]


def _stuck(intent: Intent, now: float) -> Finding:
    age, why = now - intent.created_at, str(intent.outcome.get("error") or "no answer so far")
    said = f"{intent.key} has been tried {intent.tries} times in {age / 60:.0f} min: {why}"
    hint = f"transom events --job {intent.job_id}" if intent.job_id else "transom events"
    return Finding(section="daemon", level=Level.PROBLEM, text=said, next=hint)
