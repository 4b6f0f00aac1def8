"""``transom diagnose``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from transom_cli.text import plain, safe, size, width, wrapped
from transomd.words import ExitCode, FailureClass

if TYPE_CHECKING:
    from transomd.tee.diagnose import Read
    from transomd.tee.types import Evidence, Verdict

SHOWN = 12
"""Pieces of evidence, or files, that are shown to people; ``--json`` gives all evidence."""
NEXT = (
    "next: give all that was printed around the failure at once: the logs of every rank, what srun or torchrun said, "
    "and the kernel logs of the nodes: transom diagnose rank-*.log slurm-4711.out dmesg-n*.txt"
)


@click.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diagnose(logs: tuple[str, ...], as_json: bool) -> int:
    """Say what failed, whose fault it is and what to do, from any log files of a training job: what a rank, torchrun,
    srun or the kernel wrote. No daemon and no transom job is needed.

    Give all files of one failure at once, because the earliest cause over all nodes counts. Names such as
    rank-00003.log and dmesg-n2.txt say who wrote a file. Gzip is undone; - is standard input.

    \b
    Examples:
      transom diagnose slurm-4711.out
      transom diagnose logs/rank-*.log dmesg-n*.txt
      journalctl -k | transom diagnose - --json

    Exits 0 with a verdict, 7 when the logs do not say what failed, 2 when a file cannot be read.
    """
    # The catalogue and its expressions cost start-up time that no other command should pay.
    from transomd.tee.diagnose import diagnose as look
    from transomd.tee.diagnose import verdict_to_json

    read: list[Read] = []
    verdict = look(logs, read=read)
    if as_json:
        print(json.dumps(verdict_to_json(verdict), indent=2))
    elif verdict.evidence:
        print("\n".join(page(verdict, columns=width())))
    else:
        print("\n".join(nothing_known(read, columns=width())))
    return ExitCode.UNKNOWN if verdict.failure_class is FailureClass.UNKNOWN else ExitCode.OK


def nothing_known(read: Sequence[Read], *, columns: int) -> list[str]:
    """Return what people see where no file says anything: what was read, and what to give instead."""
    lines = ["Nothing that was read says what failed:", ""]
    for one in read[:SHOWN]:
        lines += wrapped(f"{plain(one.path)}: {_of(one)}", columns)
    if len(read) > SHOWN:
        lines.append(f"  and {len(read) - SHOWN} more")
    return [*lines, "", *wrapped(NEXT, columns, indent="", whole=True)]


def _of(one: Read) -> str:
    if not one.size:
        return "empty"
    if one.binary:
        return f"{size(one.size)} of no text, so nothing in it was understood"
    lines = "1 line" if one.lines == 1 else f"{one.lines} lines"
    return f"{lines} ({size(one.size)}), without a sign of a failure that transom knows"


def page(verdict: Verdict, *, columns: int) -> list[str]:
    """Return what people see: the sentence, the facts, and the evidence with its places."""
    lines = [*wrapped(verdict.summary, columns), "", *(_fact(name, value) for name, value in _facts(verdict))]
    if verdict.evidence:
        lines += ["", "evidence"]
    for one in verdict.evidence[:SHOWN]:
        lines += _evidence(one)
    left = len(verdict.evidence) - SHOWN
    return lines if left <= 0 else [*lines, f"  and {left} more; --json shows them"]


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    return [
        ("class", f"{verdict.failure_class} ({verdict.failure_class.meaning})"),
        ("blame", f"{verdict.blame} ({verdict.blame.meaning})"),
        ("nodes", ", ".join(verdict.nodes) or "-"),
        ("ranks", ", ".join(map(str, verdict.ranks)) or "-"),
        ("action", f"{verdict.action} ({verdict.action.meaning})"),
        ("confidence", f"{verdict.confidence} ({verdict.confidence.meaning})"),
    ]


def _fact(name: str, value: str) -> str:
    return f"{name + ':':<12}{safe(value)}"


def _evidence(one: Evidence) -> list[str]:
    first, *rest = safe(one.text).split("\n")
    place = f"{safe(one.file)}:{one.line}" if one.line else safe(one.file)
    times = f" ({one.count} times)" if one.count > 1 else ""
    return [f"  {one.role} {one.signature} {place}{times}", *(f"    {line}" for line in (first, *rest))]
