"""Fuses evidence from everywhere into one verdict: what failed, whose fault it is, what to do. Pure.

The rules, first that speaks wins (:data:`RULES`):

* a time limit, a preemption or a person ended it: no failure of anybody's;
* more than half of the nodes went at once: the network or power they share; nobody is drained;
* the same exception on many ranks of several nodes: the program, and no node;
* a node that Slurm or the probe says is bad: that node, and it may be drained;
* the kernel, Slurm's words or a lost heartbeat: that node, for this job only, unless a rank's own error came first;
* a rank found stopped or stuck by its process state, unless a rank's error tells of the program or its node;
* the earliest line of a rank that is not a victim's;
* a rank killed by nobody known;
* victims: the peer that most of them name, or else the rank that is missing among those that complain;
* exit codes, where no log says why;
* nothing: *unknown*, start again in place, blame nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from transomd.tee import hang, rules, sentences
from transomd.tee.aftermath import consequences
from transomd.tee.case import Case, nodes_of, prepare
from transomd.tee.types import Evidence, Verdict
from transomd.words import Action, Blame, Confidence, FailureClass

MAX_EVIDENCE = 50
"""Most pieces of evidence that a verdict carries."""

RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    rules.ended,
    rules.fleet_lost,
    rules.same_exception,
    rules.confirmed,
    rules.hard_evidence,
    hang.stuck_process,
    rules.first_root,
    rules.killed,
    rules.voted,
    hang.missing_rank,
    rules.same_exit,
    rules.first_exit,
    hang.first_gone,
    rules.nothing,
)

_BY_PEOPLE = ("PROCESS-TRACED",)
_REPEATING = frozenset(
    {
        FailureClass.GPU_HARDWARE,
        FailureClass.GPU_MEMORY,
        FailureClass.NVLINK,
        FailureClass.NETWORK,
        FailureClass.STORAGE,
        FailureClass.NCCL_HANG,
        FailureClass.USER_CODE,
        FailureClass.CONFIG,
        FailureClass.NUMERIC,
    }
)


def fuse(
    evidence: Sequence[Evidence],
    *,
    nodes: Sequence[str],
    ranks_by_node: Mapping[str, Sequence[int]],
    previous: Sequence[Verdict] = (),
    addresses: Mapping[str, str] = MappingProxyType({}),
    has_run: bool = False,
) -> Verdict:
    """Return the verdict on one failure.

    ``nodes`` are those of the launch; empty where they are not known, and then names found in logs are believed.
    ``previous`` are the verdicts on earlier failures of the same job, oldest first. ``addresses`` maps the addresses
    by which logs may name nodes to the nodes. ``has_run`` says that the program has worked before it failed.
    """
    case = consequences(prepare(evidence, nodes, ranks_by_node, previous, addresses, has_run))
    verdict = next(found for rule in RULES if (found := rule(case)) is not None)
    verdict = _sound(_seen_again(verdict, case))
    rest = [one for one in case.evidence if one not in verdict.evidence]
    return replace(verdict, evidence=(*verdict.evidence, *rest)[:MAX_EVIDENCE])


def _sound(verdict: Verdict) -> Verdict:
    """Evidence may come from anybody: whatever it asks for, a drain needs confirmed nodes, and an exclusion nodes."""
    action = verdict.action
    if action is Action.DRAIN and not verdict.drainable:
        action = Action.EXCLUDE
    if action is Action.EXCLUDE and not verdict.nodes:
        action = Action.RESTART
    return verdict if action is verdict.action else replace(verdict, action=action)


def _seen_again(verdict: Verdict, case: Case) -> Verdict:
    """Decide what the first time could not: what stays on a node is the node's, what moves is the program's."""
    if verdict.blame is not Blame.UNKNOWN or verdict.failure_class not in _REPEATING or not verdict.evidence:
        return verdict
    alike = [one for one in case.previous if _alike(one, verdict)]
    here = verdict.evidence[0].node
    if not alike or not here or verdict.evidence[0].signature in _BY_PEOPLE:
        return verdict
    if _everywhere(verdict, case):
        if verdict.failure_class is not FailureClass.USER_CODE:
            return verdict
        summary = verdict.summary + " " + sentences.again_everywhere()
        return replace(verdict, blame=Blame.PROGRAM, action=Action.STOP, confidence=Confidence.MEDIUM, summary=summary)
    if any(one.evidence[0].node == here for one in alike):
        summary = verdict.summary + " " + sentences.again_here(here)
        return replace(
            verdict,
            blame=Blame.NODE,
            action=Action.EXCLUDE,
            nodes=(here,),
            confidence=Confidence.MEDIUM,
            summary=summary,
        )
    if verdict.failure_class is FailureClass.USER_CODE:
        summary = verdict.summary + " " + sentences.again_elsewhere(here)
        return replace(verdict, blame=Blame.PROGRAM, action=Action.STOP, confidence=Confidence.MEDIUM, summary=summary)
    return verdict


def _everywhere(verdict: Verdict, case: Case) -> bool:
    """Whether what decided was seen on most nodes of the job: that it came again then says nothing against one."""
    shown = nodes_of([one for one in verdict.evidence if one.signature == verdict.evidence[0].signature])
    return len(case.nodes) > 1 and len(shown) * 2 > len(case.nodes)


def _alike(one: Verdict, other: Verdict) -> bool:
    if one.failure_class is not other.failure_class or not one.evidence or not one.evidence[0].node:
        return False
    return one.evidence[0].signature == other.evidence[0].signature
