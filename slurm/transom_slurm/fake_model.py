"""What :class:`~transom_slurm.fake.FakeSlurm` keeps in memory: one mutable record per node and per job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transom_slurm.nodesets import HostlistError, expand
from transom_slurm.options import SbatchOption, parse_options
from transom_slurm.types import (
    ExitStatus,
    JobBase,
    JobStatus,
    NodeStatus,
    SlurmJob,
    SlurmNode,
    SlurmStep,
    SubmitRequest,
)

UNLIMITED = "UNLIMITED"
_OK = ExitStatus(0)


def seconds_of(text: str) -> int | None:
    """Seconds of a Slurm duration (``30``, ``30:00``, ``2-12``, ``1-02:03:04``); None for no limit, else ValueError."""
    if text.upper() in (UNLIMITED, "INFINITE"):
        return None
    days, dash, rest = text.rpartition("-")
    fields = [int(part) for part in rest.split(":")]
    if len(fields) > 3 or any(value < 0 for value in fields):
        raise ValueError(f"not a duration: {text}")
    if dash:
        hours, minutes, seconds = [*fields, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(fields) == 3:
        return (fields[0] * 60 + fields[1]) * 60 + fields[2]
    return fields[0] * 60 + (fields[1] if len(fields) == 2 else 0)


@dataclass(slots=True)
class FakeNode:
    """One node of the fake. ``responding`` is what slurmctld believes, ``powered`` is the truth."""

    name: str
    partitions: tuple[str, ...]
    address: str
    gres: str
    boot_time: float
    down: bool = False
    powered: bool = True
    responding: bool = True
    registered: bool = True
    flags: set[str] = field(default_factory=set)
    reason: str = ""
    reason_user: str = ""
    reason_time: float | None = None
    comment: str = ""
    jobs: set[int] = field(default_factory=set)

    def free(self) -> bool:
        """Whether a job may start here."""
        usable = not self.down and self.responding and not self.jobs
        return usable and not self.flags & {"DRAIN", "FAIL", "MAINTENANCE", "RESERVED", "REBOOT_ISSUED"}

    def say(self, reason: str, user: str, now: float) -> None:
        """Set the reason, or clear it with an empty one."""
        self.reason, self.reason_user = reason, user if reason else ""
        self.reason_time = float(int(now)) if reason else None

    def view(self) -> SlurmNode:
        """As ``scontrol show node`` would tell it."""
        base = "DOWN" if self.down else "ALLOCATED" if self.jobs else "IDLE"
        flags = frozenset(self.flags | (set() if self.responding else {"NOT_RESPONDING"}))
        return SlurmNode(
            name=self.name,
            status=NodeStatus(base, flags),
            state_text="+".join([base, *sorted(flags)]),
            reason=self.reason,
            reason_user=self.reason_user,
            reason_time=self.reason_time,
            address=self.address,
            partitions=self.partitions,
            gres=self.gres,
            boot_time=self.boot_time if self.registered else None,
            cpus=8,
            comment=self.comment,
        )


class BadRequest(ValueError):
    """The options of a submission cannot be met; the text is what sbatch would say."""


@dataclass(slots=True)
class FakeJob:
    """One job of the fake."""

    job_id: int
    name: str
    comment: str
    user: str
    partition: str
    wanted: int
    excluded: set[str]
    limit_s: int | None
    may_requeue: bool
    no_kill: bool
    work_dir: str
    script: str
    submitted: float
    base: JobBase = JobBase.PENDING
    flags: frozenset[str] = frozenset()
    reason: str = "None"
    held: bool = False
    begin: float = 0.0
    started: float | None = None
    ended: float | None = None
    ends_by: float | None = None
    nodes: list[str] = field(default_factory=list)
    batch_host: str = ""
    exit: ExitStatus = _OK
    derived: ExitStatus = _OK
    restarts: int = 0
    steps: list[SlurmStep] = field(default_factory=list)
    lasting: set[str] = field(default_factory=set)
    run: int = 0

    @property
    def running(self) -> bool:
        """Whether it holds nodes."""
        return self.base is JobBase.RUNNING

    def view(self) -> SlurmJob:
        """As ``squeue`` would tell it: while a flag is shown, the base is hidden."""
        shown = JobStatus(JobBase.UNKNOWN, self.flags) if self.flags else JobStatus(self.base)
        over = self.ended is not None
        return SlurmJob(
            job_id=self.job_id,
            name=self.name,
            user=self.user,
            status=shown,
            state_text=min(self.flags) if self.flags else self.base.value,
            reason="" if self.reason == "None" else self.reason,
            comment=self.comment,
            partition=self.partition,
            submit_time=self.submitted,
            start_time=self.started,
            end_time=self.ended,
            ends_by=self.ends_by if self.running else None,
            time_limit_s=self.limit_s,
            nodes=tuple(self.nodes),
            batch_host=self.batch_host,
            exit=self.exit if over else None,
            derived_exit=self.derived if over else None,
            priority=0 if self.held else 4294901760 - self.job_id,
            restarts=self.restarts,
            work_dir=self.work_dir,
            may_requeue=self.may_requeue,
        )

    def record(self) -> SlurmJob:
        """As accounting would tell it: it knows no flags, and how a job ended while the job is still COMPLETING."""
        return replace(self.view(), status=JobStatus(self.base), state_text=self.base.value)


def job_of(request: SubmitRequest, job_id: int, user: str, now: float, default_partition: str) -> FakeJob:
    """A new job from the options of a submission; raises BadRequest where sbatch would refuse them."""
    options = parse_options(request.options)
    if bad := [option for option in options if option.fault]:
        raise BadRequest(f"{bad[0].text}: {bad[0].fault}")
    last = {option.name: option for option in options}
    return FakeJob(
        job_id=job_id,
        name=request.name,
        comment=request.comment,
        user=user,
        partition=_value(last, "partition", default_partition),
        wanted=_number(last, "nodes", 1),
        excluded=_excluded(options),
        limit_s=_limit(last),
        may_requeue="no-requeue" not in last,
        no_kill="no-kill" in last and last["no-kill"].value != "off",
        work_dir=request.cwd,
        script=request.script,
        submitted=float(int(now)),
        held="hold" in last,
        reason="JobHeldUser" if "hold" in last else "None",
    )


def _value(options: dict[str, SbatchOption], name: str, default: str) -> str:
    return (options[name].value or default) if name in options else default


def _number(options: dict[str, SbatchOption], name: str, default: int) -> int:
    text = _value(options, name, str(default)).partition("-")[0]
    if not text.isdigit() or int(text) < 1:
        raise BadRequest(f"Invalid --{name} specification: {text}")
    return int(text)


def _limit(options: dict[str, SbatchOption]) -> int | None:
    try:
        return seconds_of(_value(options, "time", UNLIMITED))
    except ValueError:
        raise BadRequest("Invalid --time specification") from None


def _excluded(options: Sequence[SbatchOption]) -> set[str]:
    try:
        return {name for option in options if option.name == "exclude" for name in expand(option.value or "")}
    except HostlistError as error:
        raise BadRequest(str(error)) from None
