"""Turn the probe's facts into results: pure, no clock, no I/O.

A check that could not look says *unknown*; a check that has no limit, or nothing to look at, says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transomd.health import gpu, kernel
from transomd.health.profile import CHECKS, Profile
from transomd.health.types import CheckResult, NodeReport
from transomd.words import Outcome

PROBE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What one judgement is about."""

    facts: Mapping[str, Any]
    profile: Profile
    gpus: int | None
    slurm_job: int | None
    cleared_at: float


def judge(
    node: str,
    facts: Mapping[str, Any],
    profile: Profile,
    *,
    now: float,
    allocated_gpus: int | None = None,
    slurm_job: int | None = None,
    cleared_at: float = 0.0,
) -> NodeReport:
    """Hold facts against limits.

    ``allocated_gpus`` overrides the profile's count. Processes of ``slurm_job`` are never foreign. Kernel messages up
    to ``cleared_at`` (Unix seconds by the node's clock) were dealt with by a person and count no more.
    """
    if facts.get("probe") != PROBE_VERSION:
        text = f"the answer is not that of probe version {PROBE_VERSION}"
        result = CheckResult(check="probe", outcome=Outcome.UNKNOWN, value=str(facts.get("probe")), evidence=text)
        return NodeReport(node=node, at=now, reached=True, results=(result,), error=text, facts=facts)
    gpus = profile.gpus if allocated_gpus is None else allocated_gpus
    asked = Asked(facts, profile, gpus, slurm_job, cleared_at)
    found = (_one(check, asked) for check in CHECKS if profile.on(check))
    return NodeReport(node=node, at=now, reached=True, results=tuple(r for r in found if r is not None), facts=facts)


def unreached(node: str, error: str, *, now: float) -> NodeReport:
    """The report of a node that the probe could not be run on: unknown, never unfit."""
    return NodeReport(node=node, at=now, reached=False, error=error)


def _one(check: str, asked: Asked) -> CheckResult | None:
    try:
        return _JUDGES[check](asked)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as exc:
        text = f"the probe's answer could not be read: {type(exc).__name__}: {exc}"
        return CheckResult(check=check, outcome=Outcome.UNKNOWN, evidence=text)


def _result(check: str, bad: Iterable[str], *, value: str, limit: str, unknown: Iterable[str] = ()) -> CheckResult:
    """Unfit if anything is bad, else unknown if anything is, else fit."""
    bad, unknown = list(bad), list(unknown)
    outcome = Outcome.UNFIT if bad else Outcome.UNKNOWN if unknown else Outcome.FIT
    return CheckResult(check=check, outcome=outcome, value=value, limit=limit, evidence="; ".join(bad or unknown))


def _gpu_count(asked: Asked) -> CheckResult | None:
    return gpu.count(asked.facts["gpus"], asked.gpus)


def _ecc(asked: Asked) -> CheckResult | None:
    return gpu.ecc(asked.facts["gpus"], asked.gpus, asked.profile.ecc_uncorrected_max)


def _row_remap(asked: Asked) -> CheckResult | None:
    return gpu.row_remap(asked.facts["remaps"], asked.gpus)


def _throttle(asked: Asked) -> CheckResult | None:
    return gpu.throttle(asked.facts["gpus"], asked.gpus)


def _processes(asked: Asked) -> CheckResult | None:
    return gpu.processes(asked.facts["processes"], asked.gpus, asked.slurm_job, asked.profile.gpu_process_allow)


def _xid(asked: Asked) -> CheckResult | None:
    return kernel.fatal(asked.facts["kernel"], asked.cleared_at)


def _xid_reset(asked: Asked) -> CheckResult | None:
    return kernel.reset(asked.facts["kernel"], asked.cleared_at)


def _disk(asked: Asked) -> CheckResult | None:
    profile = asked.profile
    bad, unknown, least = [], [], 1.0
    for path in profile.disk_paths:
        fact = asked.facts["disk"][path]
        if "error" in fact:
            unknown.append(f"{path}: {fact['error']}")
            continue
        space = _share(fact["free_mb"], fact["total_mb"])
        inodes = _share(fact["inodes_free"], fact["inodes"])
        least = min(least, space)
        if space < profile.disk_free_min:
            bad.append(f"{path}: {fact['free_mb']} MiB of {fact['total_mb']} free ({space:.1%})")
        if inodes < profile.inodes_free_min:
            bad.append(f"{path}: {fact['inodes_free']} inodes of {fact['inodes']} free ({inodes:.1%})")
    if not profile.disk_paths:
        return None
    limit = f"{profile.disk_free_min:.1%} of space and {profile.inodes_free_min:.1%} of inodes free"
    return _result("disk", bad, unknown=unknown, value=f"{least:.1%} free", limit=limit)


def _share(free: int, total: int) -> float:
    """Free part of a whole; a file system without a fixed number of inodes says 0 of 0."""
    return free / total if total else 1.0


def _mounts(asked: Asked) -> CheckResult | None:
    paths = dict.fromkeys((*asked.profile.mounts, *asked.profile.writable))
    bad: list[str] = []
    unknown: list[str] = []
    for path in paths:
        fact = asked.facts["mounts"][path]
        if "error" in fact:
            (bad if _mount_is_bad(fact) else unknown).append(f"{path}: {_mount_text(fact)}")
        elif fact["read_only"] and path in asked.profile.writable:
            bad.append(f"{path}: mounted read-only")
    if not paths:
        return None
    return _result(
        "mounts", bad, unknown=unknown, value=f"{len(paths) - len(bad) - len(unknown)} of {len(paths)}", limit="all"
    )


def _mount_is_bad(fact: Mapping[str, Any]) -> bool:
    """A path that is not there, is stale, or on which a call began and did not return."""
    hung = fact["kind"] == "timeout" and fact.get("started", False)
    return bool(hung or fact.get("errno") in ("ENOENT", "ESTALE", "EIO", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN"))


def _mount_text(fact: Mapping[str, Any]) -> str:
    return f"stale, {fact['error']}" if fact["kind"] == "timeout" and fact.get("started") else str(fact["error"])


def _memory(asked: Asked) -> CheckResult | None:
    profile, fact = asked.profile, asked.facts["memory"]
    limits = {"total_mb": profile.memory_total_min_mb, "available_mb": profile.memory_available_min_mb}
    wanted = {name: least for name, least in limits.items() if least is not None}
    if not wanted:
        return None
    if "error" in fact:
        return _result("memory", (), unknown=[fact["error"]], value="", limit="")
    bad = [f"{name[:-3]} {fact[name]} MiB is below {least}" for name, least in wanted.items() if fact[name] < least]
    value = ", ".join(f"{name[:-3]} {fact[name]} MiB" for name in wanted)
    limit = ", ".join(f"{name[:-3]} {least} MiB" for name, least in wanted.items())
    return _result("memory", bad, value=value, limit=limit)


def _clock(asked: Asked) -> CheckResult | None:
    """The node's clock less the head's lies between ``ended - received`` and ``started - sent``."""
    head = asked.facts.get("head")
    if head is None:
        return None
    limit = asked.profile.clock_offset_max
    low = asked.facts["ended"] - head["received"]
    high = asked.facts["started"] - head["sent"]
    value = f"{low:+.2f} to {high:+.2f} s"
    bad = [f"the clock is off by {value}"] if low > limit or high < -limit else []
    unsure = [f"offset is only known to be {value}"] if low < -limit or high > limit else []
    return _result("clock", bad, unknown=unsure, value=value, limit=f"{limit:g} s")


_JUDGES: Mapping[str, Callable[[Asked], CheckResult | None]] = {
    "gpu-count": _gpu_count,
    "xid": _xid,
    "xid-reset": _xid_reset,
    "ecc": _ecc,
    "row-remap": _row_remap,
    "throttle": _throttle,
    "processes": _processes,
    "disk": _disk,
    "mounts": _mounts,
    "memory": _memory,
    "clock": _clock,
}
