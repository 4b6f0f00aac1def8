"""What a launcher may do without the daemon: what its last grant allows, on nodes that are not locally unfit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transomd.api.wire import FailureReport, Grant
from transomd.health.judge import judge
from transomd.health.profile import Profile
from transomd.tee.wire import read_evidence


def may_restart(grant: Grant | None, age_s: float, left: int, failure: FailureReport | None) -> bool:
    """Whether a grant of that age has a restart left for this failure; none is made where the program is at fault."""
    if grant is None or failure is None or left < 1 or age_s > grant.for_s:
        return False
    found = [read_evidence(e) for e in failure.evidence]
    return not any(e.role == "root" and e.blame == "program" for e in found)


def choose(usable: Sequence[str], before: Collection[str], count: int) -> list[str] | None:
    """Return the nodes of the next launch, those of the one before first; None where there are too few."""
    if len(usable) < count:
        return None
    return sorted(sorted(usable, key=lambda n: n not in before)[:count])


def still_back(told: int | None, epoch: int, saved: Sequence[Sequence[int]]) -> int | None:
    """Return the step that the newest launch was ``told`` to go back to, if nothing newer was saved since.

    ``saved`` has step and epoch of whole checkpoints, ``epoch`` is the newest launch's.
    """
    return None if any(each >= epoch for _, each in saved) else told


def unfit(facts: Mapping[str, Any], gpus: int | None, now: float, profile: Profile) -> dict[str, str]:
    """Return why nodes are unfit, from what their own agents find; what an agent cannot see (as the user) is unknown.

    ``facts`` has the probe's answer or an exception for each node; ``now`` is in Unix seconds.
    """
    found = {}
    for node, each in facts.items():
        if isinstance(each, dict):
            result = judge(node, each, profile, now=now, allocated_gpus=gpus)
            found[node] = "; ".join(f"{r.check}: {r.evidence or r.value}" for r in result.unfit)
    return {node: why for node, why in found.items() if why}
