"""Slurm's text, read into values: pure functions, fed with recorded outputs in tests.

Names, comments and paths are anybody's text and may hold any delimiter, newlines too. So fields are ended by a *token*
that is drawn anew for each query (:func:`new_token`), which nobody can have put into a name beforehand. Times are Unix
seconds, because the queries run under ``SLURM_TIME_FORMAT=%s``. What cannot be read raises SlurmUnreadable.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from transom_slurm.errors import SlurmUnreadable
from transom_slurm.nodesets import HostlistError, expand
from transom_slurm.states import parse_job_status, parse_node_status
from transom_slurm.types import ExitStatus, JobBase, JobStatus, Reservation, SlurmJob, SlurmNode, SlurmStep

JOB_FIELDS = (
    "JobId", "UserName", "State", "Reason", "SubmitTime", "StartTime", "EndTime", "TimeLimit", "NodeList", "BatchHost",
    "exit_code", "DerivedEC", "RestartCnt", "PriorityLong", "Requeue", "Partition", "Account", "QOS", "WorkDir",
    "Comment", "Name",
)  # fmt: skip
"""What ``squeue -O`` is asked for; all of these exist in 22.05 to 26.05 (ExcNodes, for one, does not)."""
STEP_FIELDS = ("StepId", "StepState", "Nodes", "StepName")
SACCT_FIELDS = (
    "JobIDRaw", "User", "State", "Reason", "Submit", "Start", "End", "TimelimitRaw", "NodeList", "ExitCode",
    "DerivedExitCode", "Priority", "Partition", "Account", "QOS", "WorkDir", "Comment", "JobName",
)  # fmt: skip

_NOT_SET = frozenset(["", "N/A", "n/a", "(null)", "None", "Unknown", "NONE", "None assigned"])
_WAITING = frozenset([JobBase.PENDING, JobBase.RUNNING, JobBase.SUSPENDED])


def new_token() -> str:
    """A delimiter for one query that no name can hold."""
    return f"~{secrets.token_hex(8)}~"


def squeue_format(fields: Sequence[str], token: str) -> str:
    """The value for ``squeue -O``: every field in full (a field without a width), each ended by the token."""
    return ",".join(f"{name}:{token}" for name in fields)


def _unreadable(what: str, text: str, why: str) -> SlurmUnreadable:
    return SlurmUnreadable(what, f"cannot read {text[:300]!r}: {why}", hint="transom doctor")


def _records(what: str, text: str, fields: Sequence[str], token: str) -> list[dict[str, str]]:
    """Cut an answer into records; every record must be whole."""
    parts = text.split(token)
    tail, width = parts.pop(), len(fields)
    if tail.strip() or len(parts) % width:
        raise _unreadable(what, tail or parts[-1], f"a record is cut off ({len(parts)} values for {width} fields)")
    rows = [parts[start : start + width] for start in range(0, len(parts), width)]
    return [dict(zip(fields, [row[0].lstrip("\n"), *row[1:]], strict=True)) for row in rows]


def _text(value: str) -> str:
    return "" if value in _NOT_SET else value


def _time(value: str) -> float | None:
    return None if value in _NOT_SET or value == "0" else float(value)


def parse_duration(text: str) -> int | None:
    """Seconds of a time limit as squeue writes it (``5:00``, ``1-00:00:00``); None without a limit.

    Raises ValueError.
    """
    if text in _NOT_SET or text in ("UNLIMITED", "INVALID", "Partition_Limit", "NOT_SET"):
        return None
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds


def parse_exit(text: str) -> ExitStatus | None:
    """``3:0`` (exit:signal), or the raw wait status that squeue prints up to some release; None where not known yet."""
    if text in _NOT_SET:
        return None
    if ":" in text:
        code, signal = text.split(":")
        return ExitStatus(int(code), int(signal))
    raw = int(text)
    if raw >= 0xFFFFFFFE:
        return None
    return ExitStatus(0, raw & 0x7F) if raw & 0x7F else ExitStatus(raw >> 8 & 0xFF)


def job_over(status: JobStatus) -> bool:
    """Whether Slurm's end time and exit code are facts; before that they are a forecast and a zero."""
    if status.base is JobBase.UNKNOWN:
        return "COMPLETING" in status.flags or "STAGE_OUT" in status.flags
    return status.base not in _WAITING


def parse_squeue(text: str, token: str) -> dict[int, SlurmJob]:
    """The jobs in the answer to ``squeue -h -a -t all -O`` with JOB_FIELDS and this token, by id."""
    jobs: dict[int, SlurmJob] = {}
    for row in _records("squeue", text, JOB_FIELDS, token):
        try:
            job = _squeue_job(row)
        except (ValueError, HostlistError) as error:
            raise _unreadable("squeue", repr(row), str(error)) from None
        if job.job_id in jobs:
            raise _unreadable("squeue", repr(row), f"job {job.job_id} is listed twice")
        jobs[job.job_id] = job
    return jobs


def _squeue_job(row: Mapping[str, str]) -> SlurmJob:
    status = parse_job_status(row["State"])
    over = job_over(status)
    return SlurmJob(
        job_id=int(row["JobId"]),
        name=row["Name"],
        user=row["UserName"],
        status=status,
        state_text=row["State"],
        reason=_text(row["Reason"]),
        comment=_text(row["Comment"]),
        partition=row["Partition"],
        account=_text(row["Account"]),
        qos=_text(row["QOS"]),
        submit_time=_time(row["SubmitTime"]),
        start_time=None if status.base is JobBase.PENDING else _time(row["StartTime"]),
        end_time=_time(row["EndTime"]) if over else None,
        ends_by=_time(row["EndTime"]) if status.base is JobBase.RUNNING else None,
        time_limit_s=parse_duration(row["TimeLimit"]),
        nodes=expand(row["NodeList"]),
        batch_host=_text(row["BatchHost"]),
        exit=parse_exit(row["exit_code"]) if over else None,
        derived_exit=parse_exit(row["DerivedEC"]) if over else None,
        priority=int(row["PriorityLong"]),
        restarts=int(row["RestartCnt"]),
        work_dir=_text(row["WorkDir"]),
        may_requeue=row["Requeue"] != "0",
    )


def parse_steps(text: str, token: str) -> list[SlurmStep]:
    """The steps in the answer to ``squeue -h -s -O`` with STEP_FIELDS and this token."""
    rows = _records("squeue", text, STEP_FIELDS, token)
    try:
        return [SlurmStep(row["StepId"], row["StepName"], row["StepState"], expand(row["Nodes"])) for row in rows]
    except HostlistError as error:
        raise _unreadable("squeue", repr(rows), str(error)) from None


def parse_sacct(text: str, token: str) -> dict[int, SlurmJob]:
    """The jobs in the answer to ``sacct -n -X -p`` with SACCT_FIELDS and this delimiter, by id.

    An id that stands for two jobs (ids are reused after a controller crash) gives the one submitted last.
    """
    jobs: dict[int, SlurmJob] = {}
    for row in _records("sacct", text, SACCT_FIELDS, token):
        try:
            job = _sacct_job(row)
        except (ValueError, HostlistError) as error:
            raise _unreadable("sacct", repr(row), str(error)) from None
        before = jobs.get(job.job_id)
        if before is None or (before.submit_time or 0) <= (job.submit_time or 0):
            jobs[job.job_id] = job
    return jobs


def _sacct_job(row: Mapping[str, str]) -> SlurmJob:
    status = parse_job_status(row["State"])
    over = job_over(status)
    limit = row["TimelimitRaw"]
    return SlurmJob(
        job_id=int(row["JobIDRaw"]),
        name=row["JobName"],
        user=row["User"],
        status=status,
        state_text=row["State"],
        reason=_text(row["Reason"]),
        comment=_text(row["Comment"]),
        partition=row["Partition"],
        account=_text(row["Account"]),
        qos=_text(row["QOS"]),
        submit_time=_time(row["Submit"]),
        start_time=_time(row["Start"]),
        end_time=_time(row["End"]) if over else None,
        time_limit_s=int(limit) * 60 if limit.isdigit() else None,
        nodes=expand(row["NodeList"]),
        exit=parse_exit(row["ExitCode"]) if over else None,
        derived_exit=parse_exit(row["DerivedExitCode"]) if over else None,
        priority=int(row["Priority"]) if row["Priority"].isdigit() else None,
        work_dir=_text(row["WorkDir"]),
    )


# Only what stands before Reason is fixed by Slurm; Reason, Comment and Extra are people's text, so the pattern is
# anchored on the fields around them, in the order in which slurm_sprint_node_table writes them.
_NODE = re.compile(
    r"NodeName=(?P<name>\S+) .*?CPUTot=(?P<cpus>\d+) .*? Gres=(?P<gres>\S+)"
    r"(?: .*?NodeAddr=(?P<address>\S+))?.*? Boards=\d+ .*?State=(?P<state>\S+) ThreadsPerCore=.*? MCS_label=\S+"
    r"(?:.*? Partitions=(?P<partitions>\S+))?.*? BootTime=(?P<boot>\S+) .*? AllocTRES=(?P<tail>.*)",
    re.DOTALL,
)
_AFTER = "Extra|InstanceId|InstanceType|ReservationName|TLSCertTokenSet|Topology|Parameters"
_TAIL = re.compile(
    r"(?:\S*)(?: (?:CapWatts|CurrentWatts|AveWatts|ExtSensors\w+)=\S+| )*"
    rf"(?: ?Reason=(?:(?P<reason>.*?) \[(?P<user>[^\[\]]+)@(?P<time>\d+)\]|(?P<unsigned>.*?))"
    rf"(?=\s*$| +(?:Comment|{_AFTER})=))?"
    rf"(?: *Comment=(?P<comment>.*?)(?=\s*$| +(?:{_AFTER})=))?",
    re.DOTALL,
)
_NODE_START = re.compile(r"^(?=NodeName=)", re.MULTILINE)


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """The nodes in the answer to ``scontrol -o show nodes``, by name."""
    nodes: dict[str, SlurmNode] = {}
    for line in _NODE_START.split(text):
        if not line.strip():
            continue
        node = _node(line)
        if node.name in nodes:
            raise _unreadable("scontrol show nodes", line, f"node {node.name} is listed twice")
        nodes[node.name] = node
    return nodes


def _node(line: str) -> SlurmNode:
    found = _NODE.match(line)
    tail = _TAIL.match(found["tail"]) if found else None
    if not found or not tail:
        raise _unreadable("scontrol show nodes", line, "not a node")
    return SlurmNode(
        name=found["name"],
        status=parse_node_status(found["state"]),
        state_text=found["state"],
        reason=tail["reason"] or (tail["unsigned"] or "").rstrip(),
        reason_user=tail["user"] or "",
        reason_time=float(tail["time"]) if tail["time"] else None,
        address=found["address"] or found["name"],
        partitions=tuple((found["partitions"] or "").split(",")) if found["partitions"] else (),
        gres=_text(found["gres"]),
        boot_time=_time(found["boot"]),
        cpus=int(found["cpus"]),
        comment=tail["comment"] or "",
    )


def parse_config(text: str) -> dict[str, str]:
    """``scontrol show config`` as it stands, key by key; a key written twice keeps its first value.

    ``SLURM_VERSION`` is the controller's.
    """
    config: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w/()]*", key.strip()):
            config.setdefault(key.strip(), value.strip())
    if "SLURM_VERSION" not in config:
        raise _unreadable("scontrol show config", text, "no SLURM_VERSION")
    return config


_SWITCH = re.compile(r"SwitchName=(?P<name>\S+) Level=(?P<level>\d+) LinkSpeed=\S+(?: Nodes=(?P<nodes>\S+))?")


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """The leaf switches in ``scontrol -o show topology``, each with its nodes; empty for a flat network."""
    switches: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        found = _SWITCH.match(line.strip())
        if found and found["level"] == "0":
            switches[found["name"]] = expand(found["nodes"] or "")
    return switches


_RESERVATION = re.compile(
    r"ReservationName=(?P<name>\S+) StartTime=(?P<start>\S+) EndTime=(?P<end>\S+) Duration=\S+ "
    r"Nodes=(?P<nodes>\S+) .*?Flags=(?P<flags>\S*)"
)


def parse_reservations(text: str) -> list[Reservation]:
    """The reservations in ``scontrol -o show reservations``."""
    reservations = []
    for line in text.splitlines():
        found = _RESERVATION.match(line.strip())
        if not found:
            if line.strip().startswith("ReservationName="):
                raise _unreadable("scontrol show reservations", line, "not a reservation")
            continue
        flags = frozenset(found["flags"].split(",")) - {""}
        start, end = _time(found["start"]), _time(found["end"])
        reservations.append(Reservation(found["name"], expand(found["nodes"]), flags, start, end))
    return reservations
