"""Findings as lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transom_cli.text import plain, wrapped
from transomd.doctor import Finding
from transomd.words import Level

MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.PROBLEM: "PROBLEM", Level.UNKNOWN: "unknown"}
WIDTH = 9


def finding_lines(findings: Sequence[Finding], columns: int) -> list[tuple[str, Level]]:
    """Return a heading a section and, for each finding, its lines within ``columns`` with its level."""
    lines: list[tuple[str, Level]] = []
    for section in dict.fromkeys(finding.section for finding in findings):
        lines += [("", Level.OK)] if lines else []
        lines.append((plain(section), Level.OK))
        lines += [line for finding in findings if finding.section == section for line in _lines(finding, columns)]
    return lines


def _lines(finding: Finding, columns: int) -> list[tuple[str, Level]]:
    first, *more = wrapped(finding.text, columns, indent=" " * (WIDTH + 2)) or [""]
    told = [f"  {MARKS[finding.level]:<{WIDTH}}{first.strip()}", *more]
    if finding.next:
        told += wrapped(f"next: {plain(finding.next)}", columns, indent=" " * (WIDTH + 2), whole=True)
    return [(line, finding.level) for line in told]


def summary(findings: Iterable[Finding]) -> str:
    """Return the counts in a sentence."""
    levels = [finding.level for finding in findings]
    counts = [(levels.count(Level.PROBLEM), "problem"), (levels.count(Level.UNKNOWN), "unknown")]
    counts.append((levels.count(Level.NOTE), "note"))
    told = [f"{count} {word}{'s' if count != 1 and word != 'unknown' else ''}" for count, word in counts if count]
    return ", ".join(told) or "all is as it should be"
