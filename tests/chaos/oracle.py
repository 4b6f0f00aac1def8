"""What may follow from each kind of fault: the oracle knows what was injected, and judges verdicts and drains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

EXPLAINS_S = 90.0
"""How long after its end a fault may still explain a failure: heartbeats, stalls, Slurm's own time-outs."""
NOTICE_S = 5.0
"""A launch that leaves a node within this time after a fault there has left it for another reason."""
PROBE_S = 15.0
"""A probe counts from when it was begun, and may see what came while it ran."""
DRAIN_SLACK_S = 30.0
"""How long after its repair Slurm may still hold a node for lost, so that it is drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault.

    ``verdicts`` are the right ones, as (class, blame); empty: it must fail no launch. ``named``: a blamed node must be
    the one that was hurt. ``drains``: that node may be drained. ``must``: it has to be noticed. ``lasts_s``: how long
    until it is healed, from and to; with ``until_over`` not before the job has recovered. ``explains_s``: how long
    after that it may still show. ``target`` is the node that is hurt: ``any`` of the launch, that of ``rank 0``, that
    of the ``batch`` script, or the ``hub``.
    """

    name: str
    verdicts: frozenset[tuple[str, str]] = frozenset()
    named: bool = False
    drains: bool = False
    must: bool = True
    lasts_s: tuple[float, float] = (1.0, 2.0)
    until_over: bool = False
    target: str = "any"
    weight: float = 1.0
    explains_s: float = EXPLAINS_S


def _kind(name: str, *verdicts: str, **more: Any) -> Kind:
    pairs = ((a, b) for a, _, b in (verdict.partition("/") for verdict in verdicts))
    return Kind(name=name, verdicts=frozenset(pairs), **more)


_LOST: dict[str, Any] = {"named": True, "drains": True, "until_over": True}
# A node that is lost at the moment of a launch fails it: nothing can be started there.
_GONE = ("host/node", "launcher/node")
_HANG = ("nccl-hang/unknown", "nccl-hang/node", "unknown/unknown")
_AWAY = ("launcher/unknown",)
_QUIET: dict[str, Any] = {"must": False, "lasts_s": (5.0, 12.0)}
_HUB: dict[str, Any] = {"must": False, "target": "hub"}

KINDS: tuple[Kind, ...] = (
    _kind("power", *_GONE, **_LOST, weight=1.5),
    _kind("net-cut", *_GONE, **_LOST, weight=1.5),
    _kind("slurmd-kill", *_GONE, **_LOST),
    _kind("slurmd-stop", *_GONE, **_LOST),
    _kind("munge-stop", *_GONE, **_LOST),
    _kind("stepd-kill", *_HANG, "launcher/unknown", must=False, explains_s=900.0),
    _kind("stepd-kill:batch", *_HANG, "host/node", "launcher/unknown", must=False, target="batch"),
    _kind("rank-kill", *_HANG, weight=2.0),
    _kind("rank-stop", *_HANG, until_over=True, weight=2.0),
    _kind("xid:79", "gpu-hardware/node", **_LOST, weight=1.5),
    _kind("gpu-lost", "gpu-hardware/node", **_LOST),
    _kind("disk-full", "storage/unknown", "storage/program", target="rank 0", lasts_s=(20.0, 40.0)),
    _kind("mount-dead", *_HANG, "storage/unknown", target="rank 0", lasts_s=(12.0, 40.0), weight=0.7),
    _kind("ecc", **_QUIET),
    _kind("slow:40", **_QUIET),
    _kind("nvidia-smi-hang", **_QUIET),
    _kind("ctld-kill", *_AWAY, "unknown/unknown", explains_s=300.0, **_HUB, lasts_s=(2.0, 8.0), weight=0.7),
    _kind("ctld-stop", *_AWAY, **_HUB, lasts_s=(3.0, 12.0), weight=0.7),
    _kind("ctld-slow", *_AWAY, **_HUB, lasts_s=(5.0, 12.0), weight=0.7),
    _kind("daemon-kill", **_HUB, lasts_s=(1.0, 10.0)),
    _kind("db-locked", **_HUB, lasts_s=(3.0, 9.0), weight=0.7),
    _kind("db-gone", **_HUB, lasts_s=(2.0, 6.0), weight=0.5),
)
BY_NAME = {kind.name: kind for kind in KINDS}
UNFIT = frozenset({"xid:79", "gpu-lost", "ecc"})
"""Faults that the probe sees whenever it looks: at the gate, and when it looks for the cause of something else."""


@dataclass(slots=True, kw_only=True)
class Injection:
    """One fault: what, where, which job it was meant for, and what became of it. Times are Unix seconds."""

    number: int
    kind: str
    node: str
    job: int
    at: float
    overlaps: bool = False
    healed_at: float | None = None
    detected_at: float | None = None
    recovered_at: float | None = None
    verdict: str = ""
    right: bool = False
    done: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def rules(self) -> Kind:
        """What may follow."""
        return BY_NAME[self.kind]

    def active(self, at: float, after_s: float = 0.0) -> bool:
        """Whether it was there at a moment, or had ended at most ``after_s`` before."""
        return self.at <= at + 1.0 and (self.healed_at is None or at <= self.healed_at + after_s)


def causes(incident: dict[str, Any], injections: Iterable[Injection]) -> list[Injection]:
    """The faults that an incident may come from: those that may fail a launch and hit its job, or are on its nodes."""
    at = float(incident["detected_at"])
    found = []
    for one in injections:
        here = one.node in incident["nodes"]
        # A submission that slurmctld lost, or a start that it did not answer.
        told = (incident["class"], incident["blame"])
        slurm = one.kind.startswith("ctld-") and (told in one.rules.verdicts or not incident["class"])
        probed = one.kind in UNFIT and here and incident["detected_by"] == "probe"
        failing = bool(one.rules.verdicts) and (one.job == incident["job_id"] or here or slurm)
        # What came before the verdict may be what it names, though something else had failed the launch.
        begun = one.at <= max(at, float(incident.get("diagnosed_at") or at)) + (PROBE_S if probed else 1.0)
        over = one.healed_at is not None and at > one.healed_at + one.rules.explains_s
        if (failing or (one.kind in UNFIT and here)) and begun and not over:
            found.append(one)
    return found


def verdict_is_right(incident: dict[str, Any], found: Sequence[Injection]) -> bool:
    """Whether one of the causes may lead to this verdict."""
    told = (str(incident["class"]), str(incident["blame"]))
    if told == ("unknown", "unknown") and "while transomd was away" in incident["summary"] and found:
        return True  # nobody was there to look, and transom does not guess
    for one in found:
        named = not one.rules.named or one.node in incident["nodes"]
        if told in one.rules.verdicts and named:
            return True
        if one.kind == "ecc" and told == ("gpu-memory", "node") and one.node in incident["nodes"]:
            return True
    return False


def drain_is_right(node: str, at: float, injections: Iterable[Injection]) -> bool:
    """Whether a node was in a state for which it may be drained."""
    return any(one.node == node and one.rules.drains and one.active(at, DRAIN_SLACK_S) for one in injections)


def was_there(one: Injection, launches: Iterable[dict[str, Any]]) -> bool:
    """Whether a launch of its job was on the node long enough, while the fault was there, to notice it."""
    until = one.healed_at if one.healed_at is not None else float("inf")
    for launch in launches:
        ended = launch["ended_at"] if launch["ended_at"] is not None else float("inf")
        if one.node in launch["nodes"] and min(ended, until) - max(launch["started_at"], one.at) > NOTICE_S:
            return True
    return False
