"""What the demo ends with: a timeline, where the time went, the proof, and all of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from demo_follow import Json, Seen
from demo_show import Show, strip
from rich.text import Text
from transom_cli.text import hosts, plain
from transom_sql.records import Launch

from transomd.tol.goodput import Goodput, goodput

FOOTNOTE = (
    "Time spent computing steps that are in the surviving history; a step that was done twice counts once. The whole "
    "is the wall-clock time from submission to end, with queue and checks. A job of weeks pays the start once, and for "
    "each failure what this one cost."
)
_STYLES = {
    "fault": "bold red",
    "diagnosed": "bold yellow",
    "drained": "bold magenta",
    "first new step": "bold green",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of the recovery, in seconds after the fault; None: it did not come."""

    name: str
    after_s: float | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether the losses of all steps equal, bit for bit, those of the run without the fault."""

    steps: int
    equal: int
    twice: tuple[int, ...] = ()
    different: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    sample: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every step is there and equal."""
        return self.steps > 0 and self.equal == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the demo found out."""

    timeline: tuple[Moment, ...]
    goodput: Goodput
    proof: Proof
    checks: Mapping[str, bool]
    detail: Json

    @property
    def passed(self) -> bool:
        """Whether everything that the demo promises was so."""
        return self.proof.holds and all(self.checks.values())

    def to_json(self) -> dict[str, Any]:
        """Return the summary for programs."""
        return {
            "passed": self.passed,
            "checks": dict(self.checks),
            "timeline_s": {moment.name: moment.after_s for moment in self.timeline},
            "goodput": {**asdict(self.goodput), "wall_s": self.goodput.wall_s, "share": self.goodput.share},
            "proof": {**asdict(self.proof), "holds": self.proof.holds},
            "job": self.detail["job"],
            "launches": self.detail["launches"],
            "incidents": self.detail["incidents"],
        }


def report(seen: Seen) -> Report:
    """Put together what was seen of a job whose node lost its power and that has ended."""
    detail, job = seen.detail, seen.job
    launches = [Launch(**{**launch, "nodes": tuple(launch["nodes"])}) for launch in detail["launches"]]
    drained = sorted(str(node["name"]) for node in seen.nodes if node.get("owner") == "transom")
    found = proof(seen)
    checks = {
        "the job completed": job["state"] == "completed",
        "it stayed in one allocation": len(detail["attempts"]) == 1,
        "it was restarted once": len(launches) == 2,
        "the node that lost its power was drained, and no other": drained == [seen.cut],
        "it went on from the nodes' memory, not from storage": "memory" in seen.resumed,
        "the loss of every step equals that without the fault": found.holds,
    }
    ended = float(job["finished_at"] or job["changed_at"])
    return Report(
        timeline=tuple(timeline(seen)),
        goodput=goodput(launches, float(job["created_at"]), ended),
        proof=found,
        checks=checks,
        detail=detail,
    )


def timeline(seen: Seen) -> Iterator[Moment]:
    """The moments of the first incident, as transom recorded them, after the fault, as the demo caused it."""
    incident: Json = next(iter(seen.detail["incidents"]), {})
    launch: Json = next((x for x in seen.detail["launches"] if x["epoch"] > incident.get("epoch", 0)), {})
    verdict = f"{incident.get('class')}, blame {incident.get('blame')} {hosts(incident.get('nodes') or ())}"
    first, last = launch.get("first_step"), incident.get("last_step")
    told = {
        "detected": (incident.get("detected_at"), f"by {_by(incident)}"),
        "fenced": (incident.get("fenced_at"), f"nothing of epoch {incident.get('epoch')} is left to write"),
        "diagnosed": (incident.get("diagnosed_at"), f"{verdict}, confidence {incident.get('confidence')}"),
        "restarted": (incident.get("acted_at"), _restarted(launch, seen.detail["launches"][0])),
        "first step": (launch.get("first_step_at"), _first(first, seen)),
        "first new step": (
            incident.get("recovered_at"),
            "" if last is None else f"step {last + 1}: back to where it was",
        ),
        "drained": (incident.get("drained_at"), f"{seen.cut}, once slurmctld had confirmed the loss"),
    }
    cut_at = seen.cut_at or 0.0
    yield Moment("fault", 0.0, f"the power of {seen.cut} is cut; the last step was {last}")
    moments = [Moment(name, None if at is None else at - cut_at, what) for name, (at, what) in told.items()]
    yield from sorted(moments, key=lambda moment: math.inf if moment.after_s is None else moment.after_s)


def _by(incident: Json) -> str:
    words = {"heartbeat": "the silence of its agent", "exit": "the end of a rank", "stall": "no step for too long"}
    return words.get(str(incident.get("detected_by")), plain(incident.get("detected_by")))


def _restarted(launch: Json, before: Json) -> str:
    nodes = launch.get("nodes") or ()
    new = sorted(set(nodes) - set(before["nodes"]))
    return f"in the same allocation on {hosts(nodes)}, {hosts(new)} being the spare"


def _first(step: int | None, seen: Seen) -> str:
    return "" if step is None else f"step {step}, resumed from {seen.resumed or 'nothing'}"


def proof(seen: Seen) -> Proof:
    """Compare the bits of every step's loss with those that were expected."""
    found, every = seen.losses(), range(1, seen.total + 1)
    times: dict[int, int] = {}
    for step in seen.steps:
        times[step.step] = times.get(step.step, 0) + 1
    equal = [n for n in every if n in found and n in seen.expected and found[n] == {seen.expected[n]}]
    missing = tuple(n for n in every if n not in found or n not in seen.expected)
    twice = tuple(sorted(n for n, count in times.items() if count > 1))
    different = tuple(n for n in every if n not in equal and n not in missing)
    shown = sorted({1, *twice[:1], *twice[-1:], *(n + 1 for n in twice[-1:]), seen.total, *different[:3]})
    sample = {n: (seen.expected.get(n, "-"), " / ".join(sorted(found.get(n, {"-"})))) for n in shown}
    return Proof(steps=seen.total, equal=len(equal), twice=twice, different=different, missing=missing, sample=sample)


def print_report(show: Show, found: Report, seen: Seen) -> None:
    """Print timeline, shares and proof."""
    show.title("4. What happened, in seconds after the fault")
    show.line()
    for moment in found.timeline:
        after = "-" if moment.after_s is None else f"{moment.after_s:.1f}"
        show.row(
            f"{after:>8}", (f" {moment.name:<15}", _STYLES.get(moment.name, "bold")), moment.what or "it did not come"
        )
    show.title("5. Where the time went")
    show.line()
    _print_shares(show, found, seen)
    show.title("6. The proof")
    show.line()
    print_proof(show, found.proof)


def _print_shares(show: Show, found: Report, seen: Seen) -> None:
    parts, head = found.goodput, "    steps/s "
    room = show.width - len(head)
    begin = float(found.detail["job"]["created_at"])
    show.line(Text(head).append_text(strip(seen, begin, max(parts.wall_s, 0.001) / room, room, show.signs)))
    show.line()
    for name, seconds, what, style in (
        ("productive", parts.productive_s, f"{parts.kept_steps} steps [1]", "bold green"),
        ("done again", parts.redone_s, f"{parts.redone_steps} steps whose result was lost with the node", "yellow"),
        ("stopped", parts.stopped_s, "from the last step before the fault to the first one after it", "red"),
        ("start", parts.starting_s, "queue, checks of the nodes, all-reduce, start of the program", ""),
        ("end", parts.ending_s, "from the last step to the end of the job", ""),
    ):
        share = seconds / parts.wall_s if parts.wall_s else 0.0
        show.row(f"{seconds:8.1f} s", (f"{share:4.0%} ", style), (f"{name:<12}", style), what)
    cost = parts.stopped_s + parts.redone_s
    show.line()
    show.line(f"  {parts.share:.0%} of {parts.wall_s:.0f} s were productive. The failure cost {cost:.1f} s.", "bold")
    show.line()
    show.row(("  [1]", "dim"), (FOOTNOTE, "dim"))


def print_proof(show: Show, found: Proof) -> None:
    """Print how the losses compare, and a few of them."""
    show.line(f"  {'step':>6}  {'without the fault':<22}  with the fault")
    for step, (without, with_fault) in found.sample.items():
        good = without == with_fault
        sign = (show.signs.yes, "green") if good else (show.signs.no, "bold red")
        again = "  computed twice" if step in found.twice and good else ""
        show.line(Text(f"  {step:>6}  {without:<22}  {with_fault:<22}  ").append(*sign).append(again, "yellow"))
    show.line()
    twice = f", {len(found.twice)} of them computed twice" if found.twice else ""
    text = f"  {found.equal} of {found.steps} losses are equal, bit for bit{twice}."
    show.line(text, "bold green" if found.holds else "bold red")
    for word, steps in (("different", found.different), ("missing", found.missing)):
        if steps:
            show.line(f"  {word}: {', '.join(map(str, steps[:20]))}", "bold red")
