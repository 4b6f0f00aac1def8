"""Turns raw facts (exit codes, heartbeats, process states, Slurm's and the probe's findings) into evidence. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transom_slurm.types import JobBase, SlurmJob, SlurmNode

from transomd.health.types import CheckResult, NodeReport
from transomd.tee.catalogue import load
from transomd.tee.progress import Stall
from transomd.tee.types import MAX_TEXT, Evidence
from transomd.words import Action, Blame, FailureClass, Role

_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_STUCK = 50
_PLANNED = frozenset({"REBOOT_ISSUED", "REBOOT_REQUESTED", "POWERING_DOWN", "POWERED_DOWN", "MAINTENANCE"})
_PROLOG = re.compile(r"(?i)\b(?:prolog|batch job complete|launch failed|duplicate jobid).{0,20}(?:error|fail|hung)")


def rank_exit(rank: int | None, node: str, code: int, at: float | None, *, told: bool = False) -> Evidence | None:
    """Return what an exit code says; None for 0. ``told`` when we ended the rank ourselves.

    ``code`` is as a shell or as ``subprocess`` gives it: 137 and -9 are both SIGKILL.
    """
    number = code - 128 if 128 < code < 193 else -code if code < 0 else 0
    if code == 0:
        return None
    asked = told or number in _ASKED_TO_END
    how = f"signal {number} ({_signal_name(number)})" if number else f"code {code}"
    return Evidence(
        source="exit",
        signature="EXIT-SIGKILL" if number == signal.SIGKILL else "EXIT-SIGNAL" if number else "EXIT",
        text=f"{_who(rank, node)} ended with {how}",
        role=Role.VICTIM if asked else Role.CONTEXT,
        at=at,
        node=node,
        rank=rank,
    )


def _who(rank: int | None, node: str) -> str:
    return ("a rank" if rank is None else f"rank {rank}") + (f" on {node}" if node else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def logs_unread(why: str, at: float) -> Evidence:
    """Say that the end of a launch's logs could not be read: that they hold no cause proves nothing."""
    return Evidence(source="log", signature="LOGS-UNREAD", text=why[:MAX_TEXT], role=Role.CONTEXT, at=at)


def heartbeat_lost(node: str, since: float) -> Evidence:
    """Say that a node's agent was last heard at ``since``. A user can end his own agent: no drain rests on it."""
    return Evidence(
        source="heartbeat",
        signature="HEARTBEAT-LOST",
        text=f"the agent on {node} stopped answering",
        role=Role.ROOT,
        failure_class=FailureClass.HOST,
        blame=Blame.NODE,
        action=Action.EXCLUDE,
        at=since,
        node=node,
    )


def silent(since: Mapping[str, float], host: str) -> list[Evidence]:
    """Say of several nodes when their agents were last heard; ``host`` is that of whoever says so.

    A launcher that does not hear the agent of its own node has lost its agents (their step was ended, for one), and
    its word for the others' loss is worth nothing: nobody is blamed.
    """
    found = [heartbeat_lost(node, at) for node, at in sorted(since.items())]
    if host not in since:
        return found
    ended = Evidence(
        source="heartbeat",
        signature="AGENTS-LOST",
        text=f"the agent on {host}, the launcher's own node, stopped answering, too",
        role=Role.ROOT,
        failure_class=FailureClass.LAUNCHER,
        blame=Blame.UNKNOWN,
        action=Action.RESTART,
        at=since[host],
        node=host,
    )
    return [ended, *(replace(one, role=Role.CONTEXT) for one in found if one.node != host)]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as ``/proc`` shows it; ``state`` is one letter (R, S, D, T, t)."""

    rank: int
    node: str
    pid: int
    state: str


_STATES = {
    "T": ("PROCESS-STOPPED", "is stopped"),
    "t": ("PROCESS-TRACED", "is held by a debugger"),
    "D": ("PROCESS-UNINTERRUPTIBLE", "waits in the kernel"),
}


def no_progress(stall: Stall, at: float, processes: Sequence[ProcessState] = ()) -> list[Evidence]:
    """Say that the job stands still, and which processes cannot go on."""
    where = f" after step {stall.step}" if stall.step is not None else ""
    stands = Evidence(
        source="progress",
        signature="NO-PROGRESS",
        text=f"no progress for {stall.seconds:.0f} s{where}, where {stall.limit:.0f} s were allowed",
        role=Role.CONTEXT,
        failure_class=FailureClass.NCCL_HANG,
        at=at,
    )
    return [*stuck(processes, at), stands]


def stuck(processes: Sequence[ProcessState], at: float) -> list[Evidence]:
    """Say which ranks have a process that cannot go on, one piece a rank; where they are many, of some of them."""
    found = {one.rank: one for one in processes if one.state in _STATES}
    return [_process(one, at) for one in list(found.values())[:_MAX_STUCK]]


def _process(one: ProcessState, at: float) -> Evidence:
    signature, what = _STATES[one.state]
    return Evidence(
        source="process",
        signature=signature,
        text=f"process {one.pid} of rank {one.rank} on {one.node} {what} (state {one.state})",
        role=Role.ROOT,
        failure_class=FailureClass.NCCL_HANG,
        at=at,
        node=one.node,
        rank=one.rank,
    )


def slurm_node(node: SlurmNode, at: float) -> Evidence | None:
    """Say what Slurm knows against a node; None when it knows nothing.

    A node that is planned to be away (reboot, power saving, maintenance) is to be left out, but never to be drained.
    """
    if node.status.responding:
        return _prolog(node, at) if _PROLOG.search(node.reason) else None
    state = node.status.base if node.status.base == "DOWN" else "NOT_RESPONDING"
    return Evidence(
        source="slurm",
        signature="SLURM-NODE-DOWN",
        text=f"{state} ({node.reason})" if node.reason else state,
        role=Role.ROOT,
        failure_class=FailureClass.HOST,
        blame=Blame.NODE,
        action=Action.EXCLUDE if node.status.flags & _PLANNED else Action.DRAIN,
        at=min(node.reason_time, at) if node.reason_time else at,
        node=node.name,
        forgeable=False,
    )


def _prolog(node: SlurmNode, at: float) -> Evidence:
    return Evidence(
        source="slurm",
        signature="SLURM-PROLOG",
        text=f"drained by Slurm ({node.reason})"[:MAX_TEXT],
        role=Role.ROOT,
        failure_class=FailureClass.HOST,
        blame=Blame.NODE,
        action=Action.EXCLUDE,
        at=min(node.reason_time, at) if node.reason_time else at,
        node=node.name,
        forgeable=False,
    )


_JOB_ENDS = {
    JobBase.TIMEOUT: (FailureClass.TIME_LIMIT, Blame.EXTERNAL, Action.RESTART, "reached its time limit"),
    JobBase.DEADLINE: (FailureClass.TIME_LIMIT, Blame.EXTERNAL, Action.STOP, "passed its deadline"),
    JobBase.PREEMPTED: (FailureClass.PREEMPTION, Blame.EXTERNAL, Action.RESTART, "was preempted"),
    JobBase.CANCELLED: (FailureClass.CANCELLED, Blame.EXTERNAL, Action.NONE, "was cancelled"),
    JobBase.OUT_OF_MEMORY: (FailureClass.HOST_MEMORY, Blame.PROGRAM, Action.STOP, "ran over its memory limit"),
    JobBase.NODE_FAIL: (FailureClass.HOST, Blame.UNKNOWN, Action.RESTART, "lost a node"),
    JobBase.BOOT_FAIL: (FailureClass.HOST, Blame.UNKNOWN, Action.RESTART, "could not boot its nodes"),
}


def slurm_job(job: SlurmJob, nodes: Sequence[SlurmNode], at: float, *, ours: bool = False) -> list[Evidence]:
    """Say how Slurm ended a job, with what it knows against the job's nodes. ``ours`` when transom cancelled it.

    A job that Slurm shows as cancelled because a prolog failed was cancelled by no person: the node is the cause.
    """
    against = [found for node in nodes if (found := slurm_node(node, at))]
    end = _JOB_ENDS.get(job.status.base)
    if end is None or (job.status.base is JobBase.CANCELLED and (ours or _infrastructure(job, against))):
        return against
    failure_class, blame, action, what = end
    ending = Evidence(
        source="slurm",
        signature=f"SLURM-{job.status.base.value.replace('_', '-')}",
        text=f"Slurm job {job.job_id} {what} ({job.state_text or job.status.base.value})"[:MAX_TEXT],
        role=Role.ROOT,
        failure_class=failure_class,
        blame=blame,
        action=action,
        at=job.end_time or at,
        forgeable=False,
    )
    return [*against, ending]


def _infrastructure(job: SlurmJob, against: Sequence[Evidence]) -> bool:
    reason = _PROLOG.search(job.reason) is not None
    return reason or any(one.signature == "SLURM-PROLOG" and one.node in job.nodes for one in against)


_CHECK_CLASSES = (
    (("ecc", "remap", "retired"), FailureClass.GPU_MEMORY),
    (("nvlink", "nvswitch", "fabricmanager", "fabric_manager", "fabric-manager"), FailureClass.NVLINK),
    (("gpu", "xid", "nvidia", "pcie", "cuda"), FailureClass.GPU_HARDWARE),
    (("mount", "disk", "space", "inode", "storage", "nfs", "lustre", "nvme"), FailureClass.STORAGE),
    (("ib", "link", "port", "network", "fabric", "nic"), FailureClass.NETWORK),
    (("memory", "oom"), FailureClass.HOST_MEMORY),
)


def probe(report: NodeReport) -> list[Evidence]:
    """Say what the probe found against a node. Not reached is no finding: unknown, and nothing rests on it."""
    if not report.reached:
        text = f"the probe could not reach {report.node}: {report.error or 'no answer'}"
        found = _probe_evidence(report, "PROBE-UNREACHED", text, FailureClass.UNKNOWN)
        return [found]
    return [_unfit(report, result) for result in report.unfit]


def _unfit(report: NodeReport, result: CheckResult) -> Evidence:
    limit = f", limit {result.limit}" if result.limit else ""
    detail = result.evidence or f"{result.value}{limit}"
    signature = result.signature or f"PROBE-{result.check.upper().replace('_', '-')}"
    found = _class_of(result)
    return _probe_evidence(report, signature, f"{result.check}: {detail}", found, Role.ROOT)


def _class_of(result: CheckResult) -> FailureClass:
    code = result.signature.removeprefix("XID-")
    if code.isdigit() and (known := load().xids.get(int(code))):
        return known.failure_class
    words = set(re.split(r"[^a-z]+", result.check.lower())) | {result.check.lower()}
    return next((found for names, found in _CHECK_CLASSES if words & set(names)), FailureClass.HOST)


def _probe_evidence(
    report: NodeReport, signature: str, text: str, failure_class: FailureClass, role: Role = Role.CONTEXT
) -> Evidence:
    against = role is Role.ROOT
    return Evidence(
        source="probe",
        signature=signature,
        text=text[:MAX_TEXT],
        role=role,
        failure_class=failure_class,
        blame=Blame.NODE if against else Blame.UNKNOWN,
        action=Action.DRAIN if against else Action.NONE,
        at=report.at,
        node=report.node,
        forgeable=False,
    )
