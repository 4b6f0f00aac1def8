"""How far the running program's checkpoints have come, from what the keeper of every node says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transomd.api.wire import MEASURES
from transomd.tce.replicate.agreement import Step
from transomd.words import Stage

Json = Mapping[str, Any]
LONGEST_S = 1e10
"""No time that anything takes is told to be longer."""


def newest(told: Iterable[Json], world_size: int, copied: tuple[Step, float] | None = None) -> list[dict[str, Any]]:
    """Return, for each stage, the newest step that every rank has there: ``{stage, step, epoch, at}``.

    ``told`` is what keepers say of each rank (``Tenant.status``). A stage that not every rank of ``world_size`` has
    reached in one epoch is left out: what some ranks have cannot be resumed from. ``at`` is when the last rank got
    there. ``copied``: the newest step of which every rank has a copy, as ranks leave out different ones, and when; it
    bears ``every`` where not every step is to be copied. Where ranks choose by measure how often storage gets a step,
    that bears ``every``, the longest of their intervals, and what it follows from (``MEASURES``).
    """
    told = list(told)
    by_rank = {one["rank"]: one.get("stages") or {} for one in told}
    rarest: Json = max(told, key=lambda one: int(one.get("every") or 0), default={})
    found = []
    for stage in Stage:
        if stage is Stage.REPLICA:
            if copied is not None:
                (epoch, step), at = copied
                found.append({"stage": stage.value, "step": step, "epoch": epoch, "at": at})
                every = max((int(one.get("replica_every") or 1) for one in told), default=1)
                found[-1].update({"every": every} if every > 1 else {})
            continue
        there = [stages[stage.value] for stages in by_rank.values() if stage.value in stages]
        if len(there) < world_size or len({one["epoch"] for one in there}) != 1:
            continue
        last = min(there, key=lambda one: one["step"])
        found.append(
            {"stage": stage.value, **last, "at": max(one["at"] for one in there if one["step"] == last["step"])}
        )
        if stage is Stage.STORAGE and rarest.get("every"):
            found[-1].update(every=int(rarest["every"]), **_measures(rarest))
    return found


def _measures(one: Json) -> dict[str, float]:
    measured = one.get("measured") or {}
    return {name: min(float(measured[name]), LONGEST_S) for name in MEASURES if name in measured}


def holders(told: Mapping[str, Json]) -> dict[str, str]:
    """Return which node holds each node's copies. ``told`` is what the keepers say of copies (``Office.status``)."""
    return {node: str(one["partner"]) for node, one in sorted(told.items()) if one["partner"]}


def copies_trouble(told: Mapping[str, Json]) -> str:
    """Return what keeps copies from other nodes, as one sentence; '' if nothing does. A single node has no other."""
    said = {node: str(one["replica_problem"] or one["no_partner"]) for node, one in sorted(told.items())}
    found = [f"{node}: {why}" for node, why in said.items() if why] if len(told) > 1 else []
    more = f" (and {len(found) - 1} more nodes)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def trouble(told: Mapping[str, Iterable[Json]]) -> str:
    """Return what keeps checkpoints from coming further, as one sentence; '' if nothing does. Keys are nodes."""
    found = [
        (str(one["problem"]), node, one["rank"]) for node, ranks in told.items() for one in ranks if one["problem"]
    ]
    if not found:
        return ""
    text, node, rank = min(found, key=lambda one: one[2])
    more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
    return f"rank {rank} on {node}: {text}{more}"


def unstored(told: Mapping[str, Iterable[Json]]) -> str:
    """Return what ranks saved last and storage has not got, as one sentence; '' if it has all. Keys are nodes."""
    found = [(one["rank"], node, one) for node, ranks in told.items() for one in ranks if _lacks(one["stages"])]
    newest = max((one["stages"]["memory"]["epoch"] for _, _, one in found), default=0)
    found = [each for each in found if each[2]["stages"]["memory"]["epoch"] == newest]
    if not found:
        return ""
    rank, node, one = min(found, key=lambda each: each[:2])
    why = f": {one['problem']}" if one["problem"] else ""
    more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
    return (
        f"step {one['stages']['memory']['step']}, which rank {rank} on {node} saved last, is not in storage{why}{more}"
    )


def _lacks(stages: Mapping[str, Json]) -> bool:
    memory, storage = (_at(stages.get(stage.value)) for stage in (Stage.MEMORY, Stage.STORAGE))
    return storage < memory


def _at(reached: Json | None) -> Step:
    return (reached["epoch"], reached["step"]) if reached else (-1, -1)
