"""The report of a chaos run: a table for people and JSON for programs."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oracle import KINDS, Injection


def write(chaos: Any, path: Path, seconds: float) -> str:
    """Write ``path.md`` and ``path.json`` and return the table."""
    text = markdown(chaos, seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(text)
    data = {
        "seed": chaos.seed,
        "seconds": round(seconds, 1),
        "totals": totals(chaos),
        "violations": chaos.violations,
        "injections": [asdict(one) for one in chaos.injections],
    }
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    return text


def totals(chaos: Any) -> dict[str, int]:
    """The numbers that matter, each counted over the whole run."""
    must = [one for one in chaos.injections if one.rules.must]
    return {
        "injected": len(chaos.injections),
        "to be noticed": len(must),
        "noticed": sum(one.detected_at is not None for one in must),
        "jobs": len(chaos.ended) + len(chaos.running),
        "jobs completed": len(chaos.ended) - _count(chaos, " is lost"),
        "nodes drained": chaos.drained,
        "wrong drains": _count(chaos, "was drained although"),
        "lost jobs": _count(chaos, " is lost") + _count(chaos, "come to an end"),
        "duplicate submissions": _count(chaos, "submitted twice"),
        "checkpoints committed": chaos.committed,
        "lost committed steps": _count(chaos, "was saved"),
        "losses compared": chaos.values,
        "losses that differ": _count(chaos, "has loss"),
        "wrong verdicts": _count(chaos, "incident"),
        "violations": len(chaos.violations),
    }


def _count(chaos: Any, words: str) -> int:
    return sum(words in text for text in chaos.violations)


def markdown(chaos: Any, seconds: float) -> str:
    """The report as it is committed."""
    lines = [
        f"`SEED={chaos.seed}`, {seconds / 60:.0f} minutes, {platform.machine()}, three jobs at a time.",
        "",
        *(f"- {name}: {number}" for name, number in totals(chaos).items()),
        "",
        "Seconds from the fault to its detection (MTTD) and to the first new step (MTTR), median and longest. "
        "*Quiet* faults must fail no launch; nothing is to be detected.",
        "",
        "| kind | injected | detected | right | recovered | MTTD | max | MTTR | max |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(_row(kind.name, [one for one in chaos.injections if one.kind == kind.name]) for kind in KINDS),
    ]
    if chaos.violations:
        lines += ["", "Violations:", "", *(f"- {text}" for text in chaos.violations)]
    return "\n".join(lines) + "\n"


def _row(name: str, group: Sequence[Injection]) -> str:
    found = [one.detected_at - one.at for one in group if one.detected_at is not None]
    back = [one.recovered_at - one.at for one in group if one.recovered_at is not None]
    quiet = not any(one.rules.verdicts for one in group)
    detected, recovered = ("quiet", "quiet") if quiet else (str(len(found)), str(len(back)))
    right = sum(one.right for one in group)
    return f"| {name} | {len(group)} | {detected} | {right} | {recovered} | {_times(found)} | {_times(back)} |"


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return " | "
    return f"{max(0.0, statistics.median(seconds)):.1f} | {max(seconds):.1f}"
