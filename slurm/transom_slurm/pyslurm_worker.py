"""The process that imports pyslurm, and the only file that does: questions come in as JSON lines, answers go out.

Run by its path, with any interpreter that has pyslurm (Python 3.9 and later): it needs nothing of transom. pyslurm's
calls hold the interpreter's lock, can hang for 49 s and can end the process (``slurm_init`` does, without a
slurm.conf), so :mod:`.pyslurm_client` keeps them here, where a deadline is a SIGKILL. Nothing here changes Slurm.

pyslurm went from dictionaries (``pyslurm.job().get()``) to classes (``pyslurm.Jobs.load()``) in the middle of its
releases for 22.05 and 23.02, and dropped the old ones by and by from 25.05 on. READERS is the one table of both.

=================  =================================================================================================
``{"ask": verb}``  one of jobs, nodes, steps, reservations
answer             ``{"rows": [...], "unread": [...]}``: rows in the order of the parameters of ``_job``, ``_node``,
                   ``_step`` and ``_reservation`` there; ids of the records that pyslurm could not read
no answer          ``{"error": text, "slurm": true}`` when Slurm did not answer, else pyslurm's own fault
=================  =================================================================================================
"""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

Row = list[Any]
Read = tuple[list[Row], list[Any]]
"""Rows, and the ids of records that could not be read."""

_KNOWN_BASE = re.compile(r"(IDLE|ALLOCATED|MIXED|DOWN|UNKNOWN|ERROR|FUTURE)\b")
_NO_VAL, _INFINITE = 0xFFFFFFFE, 0xFFFFFFFF


@cache
def _user(uid: int | None) -> str:
    """The login name as Slurm's commands print it."""
    if uid is None or uid in (_NO_VAL, _INFINITE):
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "nobody"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < _NO_VAL else None


def _gres(value: Any) -> str:
    """pyslurm cuts ``gpu:h100:8(S:0-1)`` into a dictionary, sockets apart; this is the text again, without sockets."""
    return ",".join(f"{name}:{count}" for name, count in value.items()) if isinstance(value, dict) else ",".join(value)


def _read(records: Iterable[Any], key: Callable[[Any], Any], row: Callable[[Any], Row]) -> Read:
    rows, unread = [], []
    for record in records:
        try:
            rows.append(row(record))
        except (UnicodeDecodeError, LookupError, TypeError, ValueError):
            # A name that is no UTF-8, a gres that pyslurm's pattern does not know: one record, not the whole answer.
            unread.append(key(record))
    return rows, unread


def _job(job: Any) -> Row:
    return [
        # pyslurm makes None of the text "None"; a job always has a name.
        job.id, job.name or "None", _user(job.user_id), job.state, job.state_reason or "", job.comment or "",
        job.partition or "", job.account or "", job.qos or "", job.submit_time, job.start_time, job.end_time,
        _number(job.time_limit), job.allocated_nodes or "", job.batch_host or "", job.priority, job.requeue_count,
        job.working_directory or "", bool(job.is_requeueable),
    ]  # fmt: skip


def _jobs(pyslurm: Any) -> Read:
    return _read(pyslurm.Jobs.load().values(), lambda job: job.id, _job)


def _dict_job(item: tuple[int, dict[str, Any]]) -> Row:
    job_id, job = item
    if any("\ufffd" in str(job[name]) for name in ("name", "comment", "work_dir")):
        raise ValueError("the old API put signs of its own where a text is no UTF-8")
    return [
        job_id, job["name"] or "None", _user(job["user_id"]), job["job_state"], job["state_reason"] or "",
        job["comment"] or "", job["partition"] or "", job["account"] or "", job["qos"] or "",
        _number(job["submit_time"]), _number(job["start_time"]), _number(job["end_time"]), _number(job["time_limit"]),
        job["nodes"] or "", job["batch_host"] or "", job["priority"], job["restart_cnt"], job["work_dir"] or "",
        bool(job["requeue"]),
    ]  # fmt: skip


def _dict_jobs(pyslurm: Any) -> Read:
    return _read(pyslurm.job().get().items(), lambda item: item[0], _dict_job)


def _mixed(state: str, allocated: int | None, usable: int | None) -> str:
    """Slurm's own rule for MIXED, which pyslurm applies from 23.11 on only: some processors in use, not all."""
    if not usable or not allocated or allocated >= usable:
        return state
    return "+".join(["MIXED", *state.split("+")[1:]])


def _node(node: Any) -> Row:
    try:
        reason_user = node.reason_user or ""
    except KeyError:
        reason_user = "nobody"
    return [
        node.name, _mixed(node.state, node.allocated_cpus, node.effective_cpus), node.reason or "", reason_user,
        node.reason_time, node.address or "", list(node.partitions or ()), _gres(node.configured_gres or {}),
        node.boot_time, node.total_cpus, node.comment or "",
    ]  # fmt: skip


def _nodes(pyslurm: Any) -> Read:
    return _read(pyslurm.Nodes.load().values(), lambda node: node.name, _node)


def _dict_node(node: dict[str, Any]) -> Row:
    # The old API writes IDLE*+CLOUD+DRAIN, "+POWER" for a node that is off, and one word for several (MAINT, PLANNED).
    if not _KNOWN_BASE.match(node["state"]):
        raise ValueError("the old API hides the base state")
    state = node["state"].replace("+POWER", "+POWERED_DOWN") if node["state"].endswith("+POWER") else node["state"]
    return [
        node["name"], state, node["reason"] or "", _user(node["reason_uid"]) if node["reason"] else "",
        _number(node["reason_time"]), node["node_addr"] or "", list(node["partitions"] or ()),
        _gres(node["gres"] or ()), _number(node["boot_time"]), node["cpus"], "",
    ]  # fmt: skip


def _dict_nodes(pyslurm: Any) -> Read:
    return _read(pyslurm.node().get().values(), lambda node: node["name"], _dict_node)


def _step(step: Any) -> Row:
    # pyslurm splits n[1,3] at its comma.
    nodes = step.allocated_nodes
    return [
        f"{step.job_id}.{step.id}",
        step.name or "",
        step.state or "",
        nodes if isinstance(nodes, str) else ",".join(nodes or ()),
    ]


def _steps(pyslurm: Any) -> Read:
    every = [step for steps in pyslurm.JobSteps.load_all().values() for step in steps.values()]
    return _read(every, lambda step: f"{step.job_id}.{step.id}", _step)


def _dict_reservation(item: tuple[str, dict[str, Any]]) -> Row:
    name, kept = item
    return [name, kept["node_list"] or "", kept["flags"] or "", _number(kept["start_time"]), _number(kept["end_time"])]


def _dict_reservations(pyslurm: Any) -> Read:
    return _read(pyslurm.reservation().get().items(), lambda item: item[0], _dict_reservation)


READERS: tuple[tuple[str, str, Callable[[Any], Read]], ...] = (
    ("jobs", "Jobs", _jobs),
    ("jobs", "job", _dict_jobs),
    ("nodes", "Nodes", _nodes),
    ("nodes", "node", _dict_nodes),
    ("steps", "JobSteps", _steps),
    # Until 25.05. The class that took its place has names of its own for flags, and fails on those it does not know.
    ("reservations", "reservation", _dict_reservations),
)
"""Verb, the name in pyslurm that must be there, reader; the first that fits is used. The rest is asked of commands."""


def readers(pyslurm: Any) -> dict[str, Callable[[Any], Read]]:
    """What this pyslurm can be asked, and how."""
    found: dict[str, Callable[[Any], Read]] = {}
    for verb, name, reader in READERS:
        if hasattr(pyslurm, name):
            found.setdefault(verb, reader)
    return found


def answer(pyslurm: Any, known: dict[str, Callable[[Any], Read]], verb: str) -> dict[str, Any]:
    """One answer to one question; never raises."""
    try:
        rows, unread = known[verb](pyslurm)
    except Exception as error:
        refused = isinstance(error, getattr(pyslurm, "RPCError", ())) or (
            # The old API raises ValueError(text, errno) for what Slurm says.
            type(error) is ValueError and len(error.args) == 2
        )
        words = str(error.args[0]) if refused and error.args else f"{type(error).__name__}: {error}"
        return {"error": words, "slurm": refused}
    return {"rows": rows, "unread": unread}


def main() -> int:
    """Say who one is, then answer until the questions end."""
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    # Whatever pyslurm or Slurm's library prints must not get between the answers.
    os.dup2(2, 1)

    def say(words: dict[str, Any]) -> None:
        print(json.dumps(words, separators=(",", ":")), file=out, flush=True)

    try:
        # Not at the top: where there is no slurm.conf this line ends the process.
        import pyslurm  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    known = readers(pyslurm)
    say({"pyslurm": pyslurm.__version__, "verbs": sorted(known)})
    for line in sys.stdin:
        say(answer(pyslurm, known, json.loads(line)["ask"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
