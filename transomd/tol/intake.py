"""A launcher's report made fit to work with: it comes from the user's side, so nothing in it is trusted. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transomd.api.wire import FailureReport, LauncherReport, LaunchReport
from transomd.tee.wire import plain
from transomd.words import LauncherPhase

MAX_LAUNCHES = 64
MAX_NODES = 20_000
MAX_EVIDENCE = 200
MAX_TEXT = 1000
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def sound(report: LauncherReport) -> LauncherReport:
    """Return the report with its texts cut and cleaned.

    Raises ValueError, which names the field, when a value is not of the kind and size that it must be.
    """
    _whole(report, ("job_id", "attempt", "slurm_job_id", "generation"))
    _whole(report, ("checkpoint_step", "checkpoint_epoch", "exit_code"), optional=True)
    _times(report, ("at",))
    _times(report, ("checkpoint_at",), optional=True)
    _require(report.phase in list(LauncherPhase), f"phase: {str(report.phase)[:40]!r} is no phase of a launcher")
    _names("host", [report.host])
    _names("nodes", report.nodes)
    _names("lost", report.lost)
    _require(isinstance(report.unfit, dict), "unfit: does not map nodes to reasons")
    _names("unfit", list(report.unfit))
    _require(len(report.launches) <= MAX_LAUNCHES, f"launches: more than {MAX_LAUNCHES}")
    _require(len(report.past_failures) <= MAX_LAUNCHES, f"past_failures: more than {MAX_LAUNCHES}")
    return replace(
        report,
        unfit={node: _text("unfit", why) for node, why in report.unfit.items()},
        launches=[_launch(launch) for launch in report.launches],
        failure=_failure(report.failure) if report.failure is not None else None,
        past_failures=[_failure(failure) for failure in report.past_failures],
        message=_text("message", report.message),
    )


def _launch(launch: LaunchReport) -> LaunchReport:
    _whole(launch, ("epoch",))
    _whole(launch, ("resume_step", "first_step", "last_step"), optional=True)
    _times(launch, ("started_at",))
    _times(launch, ("ended_at", "first_step_at", "new_step_at", "last_step_at"), optional=True)
    _names("launches.nodes", launch.nodes)
    _require(bool(launch.nodes), "launches.nodes: is empty")
    return replace(launch, end_reason=_text("launches.end_reason", launch.end_reason))


def _failure(failure: FailureReport) -> FailureReport:
    _whole(failure, ("epoch",))
    _times(failure, ("detected_at",))
    _times(failure, ("fenced_at",), optional=True)
    _names("failure.lost_nodes", failure.lost_nodes)
    _names("failure.unfenced", failure.unfenced)
    found = failure.evidence
    _require(isinstance(found, list) and len(found) <= MAX_EVIDENCE, f"failure.evidence: no list up to {MAX_EVIDENCE}")
    _require(all(isinstance(item, dict) for item in found), "failure.evidence: does not hold objects")
    return replace(failure, detected_by=_text("failure.detected_by", failure.detected_by))


def _whole(record: Any, names: Iterable[str], *, optional: bool = False) -> None:
    for name in names:
        value = getattr(record, name)
        right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
        _require(right or (optional and value is None), f"{name}: {str(value)[:40]!r} is no whole number")


def _times(record: Any, names: Iterable[str], *, optional: bool = False) -> None:
    for name in names:
        value = getattr(record, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        right = number and math.isfinite(value) and 0 <= value < 1e12
        _require(right or (optional and value is None), f"{name}: {str(value)[:40]!r} is no time in Unix seconds")


def _text(field: str, value: object) -> str:
    _require(isinstance(value, str), f"{field}: is no text")
    return plain(str(value), MAX_TEXT)


def _names(field: str, values: Any) -> None:
    _require(isinstance(values, list) and len(values) <= MAX_NODES, f"{field}: is no list of nodes")
    for value in values:
        _require(isinstance(value, str) and bool(_NODE.fullmatch(value)), f"{field}: {str(value)[:40]!r} is no node")


def _require(right: bool, message: str) -> None:
    if not right:
        raise ValueError(f"the launcher's report: {message}")
