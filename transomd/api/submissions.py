"""What a submission must be before it is taken: pure checks, each of which says all that is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transom_slurm.types import SlurmNode
from transom_sql.records import Job

from transomd.errors import RefusedError, SpecError, UsageError
from transomd.modes import user_name
from transomd.settings import PolicySettings
from transomd.spec import JobSpec
from transomd.words import JobState

MAX_PATH = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_limits(spec: JobSpec, policy: PolicySettings) -> None:
    """Raise SpecError for a job that asks for more than the site allows."""
    names = ("max_restarts", "max_user_restarts", "max_attempts", "no_progress_limit")
    asked = [(name, getattr(spec.policy, name), getattr(policy, name)) for name in names]
    faults = tuple(
        f"policy.{name}: {value} is above the site's ceiling of {top}" for name, value, top in asked if value > top
    )
    if faults:
        raise SpecError("the job asks for more than the site allows", faults, hint="lower it and submit again")


def check_partition(spec: JobSpec, nodes: Mapping[str, SlurmNode] | None) -> None:
    """Raise SpecError for a partition that Slurm does not have; while Slurm does not answer there is no telling."""
    if nodes is None or not spec.partition:
        return
    known = sorted({p for node in nodes.values() for p in node.partitions})
    unknown = [p for p in spec.partition.split(",") if p not in known]
    if unknown:
        fault = f"partition: Slurm has no {', '.join(unknown)}; it has {', '.join(known)}"
        raise SpecError("the job cannot be submitted", (fault,), hint="sinfo -o %P")


def check_owner(uid: int, personal: bool) -> None:
    """Raise RefusedError where a daemon of one user's is asked for somebody else's job, be it root's."""
    if personal and uid != os.geteuid():
        owner = user_name(os.geteuid())
        raise RefusedError(f"this transomd is {owner}'s own and runs {owner}'s jobs only", hint="submit as yourself")


def check_room(job: Job, active: Iterable[Job], most: int | None) -> None:
    """Raise RefusedError for one job too many (``most`` None: there is no limit), or for a run folder that is taken."""
    others = list(active)
    if most is not None and sum(other.uid == job.uid for other in others) >= most:
        raise RefusedError(f"you have {most} jobs already (policy.max_jobs)", hint="transom status")
    if any(other.run_dir == job.run_dir for other in others):
        raise RefusedError(f"the run folder {job.run_dir} is another job's", hint="transom status")


def new_job(spec: JobSpec, uid: int, body: Mapping[str, Any], token_sha256: object, now: float) -> Job:
    """Return the record of a job. Raises UsageError for a path or a digest that is none."""
    if not isinstance(token_sha256, str) or not _SHA256.fullmatch(token_sha256):
        raise UsageError("submit: token_sha256 must be the SHA-256 of the job's token, in lower-case hexadecimal")
    return Job(
        name=spec.name,
        user=user_name(uid),
        uid=uid,
        spec=spec.model_dump(mode="json"),
        run_dir=_path("run_dir", body.get("run_dir")),
        cwd=_path("cwd", body.get("cwd")),
        token_sha256=token_sha256,
        state=JobState.SUBMITTED.value,
        reason="recorded",
        created_at=now,
        changed_at=now,
    )


def _path(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or len(value) > MAX_PATH or not value.isprintable():
        raise UsageError(f"submit: {key} must be an absolute path of at most {MAX_PATH} printable characters")
    return value
