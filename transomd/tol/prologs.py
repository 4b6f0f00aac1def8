"""What a failed prolog looks like: the job is cancelled, or put back and held, and only the node says why. Pure.

Facts of Slurm 22.05 to 26.05: a job that may not be requeued ends CANCELLED, as if a person had done it; one that may
is PENDING, held, with the reason ``launch failed requeued held``, and stays so for ever.
"""

from __future__ import annotations

import re

from transom_slurm.pending import LAUNCH_FAILED, plain_reason
from transom_slurm.types import SlurmJob, SlurmNode

from transomd.tol.view import JobView, World

# Slurm's own words, or what transom wrote in their place once it knew the check (tol/findings.py).
_PROLOG_ERROR = re.compile(r"(?:transom\[[\w-]+\] )?Prolog error\b")


def prolog_failed(view: JobView, world: World, job: SlurmJob) -> bool:
    """Whether a CANCELLED job fell to a failed prolog."""
    return bool(_failed_on(world, job.nodes or view.attempt.nodes, job.start_time or job.submit_time or 0.0))


def held_for_launch(job: SlurmJob) -> bool:
    """Whether Slurm has put a job back and holds it because its launch failed; only a person would release it."""
    return plain_reason(job.reason) == plain_reason(LAUNCH_FAILED)


def culprits(view: JobView, world: World, job: SlurmJob) -> tuple[str, ...]:
    """Return the nodes whose prolog has failed since a held job was submitted: it holds none any more."""
    # Slurm's own submit time of a job that it has put back is when it did so.
    since = min(job.submit_time or view.attempt.created_at, view.attempt.created_at)
    return _failed_on(world, view.attempt.nodes or tuple(world.slurm.nodes or ()), since)


def _failed_on(world: World, names: tuple[str, ...], since: float) -> tuple[str, ...]:
    known = world.slurm.nodes or {}
    return tuple(sorted(n for n in names if n in known and _failed_since(known[n], since)))


def _failed_since(node: SlurmNode, since: float) -> bool:
    # Slurm tells whole seconds.
    return bool(_PROLOG_ERROR.match(node.reason)) and int(node.reason_time or since) >= int(since)
