"""Judge what nvidia-smi said: pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os.path import basename
from typing import Any

from transomd.health.types import CheckResult
from transomd.words import Outcome

_LOST = re.compile(r"Unable to determine the device handle for GPU\s?\S+: (?:Unknown Error|GPU is lost)|GPU is lost")
_NONE = re.compile(r"No devices were found")
_MISMATCH = re.compile(r"Driver/library version mismatch")
MISMATCH = "NVML-MISMATCH"
"""The signature of a driver whose libraries were replaced: no program can start, and those that run go on."""

_THROTTLE = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}
"""Bits of ``clocks_event_reasons.active`` (nvml.h) that mean trouble. Power cap (0x4), idle, application clocks,
sync boost and software thermal slowdown are normal operation."""

Facts = Mapping[str, Any]


def _answer(check: str, outcome: Outcome, value: str = "", limit: str = "", evidence: str = "") -> CheckResult:
    return CheckResult(check=check, outcome=outcome, value=value, limit=limit, evidence=evidence)


def _failed(check: str, facts: Facts, expected: int | None) -> CheckResult | None:
    """A part that failed: unknown, or nothing at all on a node that is not known to have GPUs and has no tool."""
    if facts["kind"] == "absent" and not expected:
        return None
    return _answer(check, Outcome.UNKNOWN, evidence=str(facts["error"]))


def count(facts: Facts, expected: int | None) -> CheckResult | None:
    """Every expected GPU answers. More than expected is fit; a GPU that the driver calls lost is not."""
    check, limit = "gpu-count", "" if expected is None else str(expected)
    notes = "; ".join(facts.get("notes", ()))
    text = notes or str(facts.get("error", ""))
    if _LOST.search(text):
        return _lost(facts, limit, text)
    if "error" in facts:
        if expected and (_NONE.search(text) or _MISMATCH.search(text)):
            signature = MISMATCH if _MISMATCH.search(text) else ""
            return replace(_answer(check, Outcome.UNFIT, "0", limit, text), signature=signature)
        return _failed(check, facts, expected)
    if expected is None:
        return None
    rows = facts["rows"]
    if len(rows) >= expected:
        return _answer(check, Outcome.FIT, str(len(rows)), limit)
    present = ", ".join(str(row.get("pci.bus_id", row.get("index", "?"))) for row in rows) or "none"
    return _answer(
        check, Outcome.UNFIT, str(len(rows)), limit, f"nvidia-smi shows {present}" + (f"; {notes}" if notes else "")
    )


def _lost(facts: Facts, limit: str, text: str) -> CheckResult:
    value = str(len(facts.get("rows", ())))
    return CheckResult(
        check="gpu-count", outcome=Outcome.UNFIT, value=value, limit=limit, evidence=text, signature="NVML-LOST"
    )


def _number(cell: object) -> int | None:
    """A cell as a number; None for ``[N/A]``, ``[Not Supported]`` and their like."""
    try:
        return int(str(cell), 0)
    except ValueError:
        return None


def _column(rows: Iterable[Facts], *names: str) -> list[tuple[str, int]]:
    """(GPU, number) of every row where one of these columns holds a number."""
    found = []
    for row in rows:
        number = next((n for n in (_number(row.get(name)) for name in names) if n is not None), None)
        if number is not None:
            found.append((_name(row), number))
    return found


def _name(row: Facts) -> str:
    return "GPU " + str(row.get("index") or row.get("gpu_bus_id") or row.get("gpu_uuid") or "?")


def _verdict(check: str, bad: Sequence[str], value: str, limit: str) -> CheckResult:
    return _answer(check, Outcome.UNFIT if bad else Outcome.FIT, value, limit, "; ".join(bad))


def ecc(facts: Facts, expected: int | None, most: int) -> CheckResult | None:
    """Uncorrected errors since the last reset; says nothing where no GPU has the counter."""
    if "error" in facts:
        return _failed("ecc", facts, expected)
    counts = _column(facts["rows"], "ecc.errors.uncorrected.volatile.total")
    if not counts:
        return None
    bad = [f"{name}: {number} uncorrected errors" for name, number in counts if number > most]
    return _verdict("ecc", bad, str(max(number for _, number in counts)), str(most))


def row_remap(facts: Facts, expected: int | None) -> CheckResult | None:
    """A failed remapping is unfit; a pending one waits for a reset and is fit."""
    if "error" in facts:
        return None if "notes" in facts else _failed("row-remap", facts, expected)
    rows = [row for row in facts["rows"] if _yes(row.get("remapped_rows.failure")) is not None]
    if not rows:
        return None
    bad = [f"{_name(row)}: row remapping failed" for row in rows if _yes(row["remapped_rows.failure"])]
    pending = sum(bool(_yes(row.get("remapped_rows.pending"))) for row in rows)
    return _verdict("row-remap", bad, f"{len(bad)} failed, {pending} pending a reset", "0 failed")


def _yes(cell: object) -> bool | None:
    """``Yes``/``No`` or ``1``/``0``; None where the GPU has no such thing."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(str(cell).lower())


def throttle(facts: Facts, expected: int | None) -> CheckResult | None:
    """Hardware slowdown, thermal or power brake at this moment."""
    if "error" in facts:
        return _failed("throttle", facts, expected)
    masks = _column(facts["rows"], "clocks_event_reasons.active", "clocks_throttle_reasons.active")
    if not masks:
        return None
    bad = [f"{name}: {', '.join(_reasons(mask))}" for name, mask in masks if _reasons(mask)]
    return _verdict("throttle", bad, ", ".join(sorted({hex(mask) for _, mask in masks})), "no hardware slowdown")


def _reasons(mask: int) -> list[str]:
    return [text for bit, text in _THROTTLE.items() if mask & bit]


def processes(facts: Facts, expected: int | None, slurm_job: int | None, allow: Sequence[str]) -> CheckResult | None:
    """No process of another computes on a GPU.

    With ``slurm_job`` everything that is not of that job is foreign (the nodes are exclusive); without it, what
    belongs to no Slurm job. Processes of root and those in ``allow`` are the site's own.
    """
    if "error" in facts:
        return _failed("processes", facts, expected)
    bad = []
    for row in facts["rows"]:
        name, job = basename(str(row["process_name"])), str(row["slurm_job"])
        own = job == str(slurm_job) if slurm_job is not None else bool(job)
        if not own and name not in allow and row["uid"] not in (0, None):
            bad.append(f"process {row['pid']} ({name}, uid {row['uid']}, {f'job {job}' if job else 'no job'})")
    return _verdict("processes", bad, str(len(bad)), "0")
