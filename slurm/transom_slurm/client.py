"""The seam to Slurm: one protocol, implemented by :mod:`.commands` (real) and :mod:`.fake` (in memory, virtual clock).

Every method raises :class:`~transom_slurm.errors.SlurmUnavailable` when Slurm did not answer: callers treat that as
*unknown*. A query that returns is complete: what it does not list, Slurm does not know.
The end time, the exit codes and a waiting job's start time are None while they are but forecasts.
One contract suite (``tests/contract/test_slurm_client.py``) runs over every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from transom_slurm.types import Reservation, SlurmJob, SlurmNode, SlurmStep, SubmitRequest


class SlurmClient(Protocol):
    """Few verbs; all of them have a deadline of their own."""

    async def jobs(self) -> Mapping[int, SlurmJob]:
        """Every job that slurmctld holds in memory, ended ones included, by id: one bulk query."""
        ...

    async def nodes(self) -> Mapping[str, SlurmNode]:
        """Every node by name: one bulk query."""
        ...

    async def finished(self, job_ids: Collection[int], since: float) -> Mapping[int, SlurmJob]:
        """What accounting knows of these jobs since ``since`` (Unix seconds).

        The newest record of each id. Without accounting the result is empty, which proves nothing.
        """
        ...

    async def find(self, name: str) -> Sequence[SlurmJob]:
        """Every job that slurmctld holds, ended or not, with exactly this name: how an ambiguous submission is settled.

        Names may be used twice, and the list is what slurmctld knows *now*: after an outage look again a little later.
        """
        ...

    async def submit(self, request: SubmitRequest) -> int:
        """Submit and return the job id.

        Raises SlurmRejected (bad request), SlurmDenied, SubmitAmbiguous (may have been accepted).
        """
        ...

    async def cancel(self, job_id: int) -> None:
        """Cancel a job. A job that is gone already is no error."""
        ...

    async def drain(self, node: str, reason: str) -> None:
        """Set DRAIN with this reason, through ``scontrol``. The caller has looked at the node first."""
        ...

    async def resume(self, node: str, *, down: bool = False) -> None:
        """Clear DRAIN (``scontrol update state=undrain``); its reason goes too, if it is not new and the node not DOWN.

        With ``down`` a node that is DOWN is brought back as well (``state=resume``): it is given work as soon as its
        slurmd answers.

        slurmctld makes the node register anew: for a second or so it is NOT_RESPONDING and has no boot time.
        """
        ...

    async def comment_node(self, node: str, text: str) -> None:
        """Set a node's comment (one line; empty clears it), which changes nothing of what it may run."""
        ...

    async def update_job(self, job_id: int, fields: Mapping[str, str]) -> None:
        """``scontrol update jobid=... k=v ...``."""
        ...

    async def config(self) -> Mapping[str, str]:
        """``scontrol show config``, plus ``SLURM_VERSION`` (for example ``22.05.8``)."""
        ...

    async def topology(self) -> Mapping[str, tuple[str, ...]]:
        """Leaf switches and their nodes; empty without a topology plugin."""
        ...

    async def reservations(self) -> Sequence[Reservation]:
        """All reservations."""
        ...

    async def steps(self, job_id: int) -> Sequence[SlurmStep]:
        """The running steps of one job."""
        ...
