"""The rules of :mod:`transomd.tee.verdict`, each from a case to a verdict, or None where it has nothing to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from transomd.tee import sentences
from transomd.tee.aftermath import by_signal
from transomd.tee.case import LOST, Case, before, nodes_of, ranks_of, shape, together
from transomd.tee.types import Evidence, Verdict
from transomd.words import Action, Blame, Confidence, FailureClass, Role

ENDING_GRACE_S = 30.0
"""What a rank says while it is being ended is a consequence; Slurm's own line may come that much later."""

HARD_BEFORE_S = 600.0
"""Slurm notices a lost node only minutes later: its word counts although a rank complained before."""

CLOCKS_S = 5.0
"""How far the clocks of two nodes may be apart."""

ALIKE = frozenset({"SL-EXECVE", "CUDA-ORDINAL", "CUDA-NOIMAGE", "PY-SYNTAX"})
"""What a program that is set up wrongly meets on every node: on one only, a mount or a GPU is missing there."""

ONCE_RUN = frozenset({"PY-IMPORT", "PY-NOFILE"})
"""The same, once the program has run: what it imports and reads is there, if not on this node."""

_ENDINGS = (FailureClass.TIME_LIMIT, FailureClass.PREEMPTION, FailureClass.CANCELLED)
_NAN = FailureClass.NUMERIC
_HARD = ("kernel", "slurm", "heartbeat")
_EXCEPTIONS = (FailureClass.USER_CODE, FailureClass.CONFIG, FailureClass.HOST_MEMORY, FailureClass.STORAGE)


def ended(case: Case) -> Verdict | None:
    """A time limit, a preemption or a person."""
    endings = [one for one in case.roots if one.failure_class in _ENDINGS]
    if not endings:
        return None
    first = next((one for one in endings if not one.forgeable), endings[0])
    if first.forgeable and any(not before(first, one, ENDING_GRACE_S) for one in case.roots):
        return None
    return Verdict(
        failure_class=first.failure_class,
        blame=Blame.EXTERNAL,
        action=first.action,
        confidence=Confidence.MEDIUM if first.forgeable else Confidence.HIGH,
        summary=sentences.ending(first),
        evidence=(first,),
    )


def fleet_lost(case: Case) -> Verdict | None:
    """More than half of the nodes at once: what they share, and nobody is drained."""
    found = [one for one in case.of(*LOST) if one.role is not Role.CONTEXT]
    nodes = nodes_of(found)
    if not case.most(len(nodes)):
        return None
    return Verdict(
        failure_class=FailureClass.NETWORK,
        blame=Blame.NETWORK,
        action=Action.WAIT,
        confidence=Confidence.MEDIUM,
        summary=sentences.fleet(nodes, len(case.nodes)),
        evidence=tuple(found),
    )


def same_exception(case: Case) -> Verdict | None:
    """The same exception on at least 3 ranks of 2 nodes, or on every rank: the program's."""
    programs = [one for one in case.roots if one.blame is Blame.PROGRAM and one.source == "log"]
    programs = [one for one in programs if one.failure_class in _EXCEPTIONS]
    for first in programs:
        group = [one for one in programs if shape(one) == shape(first) and together(first, one)]
        if _many(group, case) and not _consequence(first, case):
            return Verdict(
                failure_class=first.failure_class,
                blame=Blame.PROGRAM,
                action=first.action,
                confidence=Confidence.HIGH,
                summary=sentences.program(first, group, case),
                ranks=ranks_of(group),
                evidence=tuple(group),
            )
    return None


def _many(group: Sequence[Evidence], case: Case) -> bool:
    ranks = set(ranks_of(group))
    if case.ranks and ranks >= case.ranks:
        return True
    return len(ranks) >= 3 and (len(nodes_of(group)) >= 2 or not case.nodes)


def _consequence(first: Evidence, case: Case) -> bool:
    """Whether a node was lost about then, or numbers went wrong: all ranks may raise the same because of it."""
    for one in case.roots:
        if one.signature in LOST and before(one, first, HARD_BEFORE_S if one.source == "slurm" else CLOCKS_S):
            return together(one, first, HARD_BEFORE_S)
        if one.source == "kernel" and one.blame is Blame.NODE and before(one, first, 0):
            return together(one, first, HARD_BEFORE_S)
        if one.failure_class is _NAN and case.evidence.index(one) < case.evidence.index(first):
            return together(one, first)
    return False


def confirmed(case: Case) -> Verdict | None:
    """A node that Slurm or the probe says is bad."""
    sure = [one for one in case.roots if not one.forgeable and one.blame is Blame.NODE and one.node]
    common = {check for check, _ in _checks(sure) if case.most(len({n for c, n in _checks(sure) if c == check}))}
    sure = [one for one in sure if one.signature not in common]
    if not sure:
        return None
    also = [one for one in case.roots if one.blame is Blame.NODE and one.node and one.source in _HARD and one.forgeable]
    named = sorted([*sure, *also], key=lambda one: case.evidence.index(one))
    nodes, drainable = nodes_of(named), nodes_of([one for one in sure if one.action is Action.DRAIN])
    first = next(one for one in named if one.node in nodes_of(sure))
    return Verdict(
        failure_class=_class_of(first, [one for one in named if one.node == first.node]),
        blame=Blame.NODE,
        action=Action.DRAIN if drainable else Action.EXCLUDE,
        confidence=Confidence.HIGH,
        summary=sentences.nodes_bad(named, Action.DRAIN if drainable else Action.EXCLUDE),
        nodes=nodes,
        drainable=drainable,
        evidence=(first, *[one for one in named if one is not first]),
    )


def _checks(evidence: Sequence[Evidence]) -> set[tuple[str, str]]:
    return {(one.signature, one.node) for one in evidence if one.source == "probe"}


def _class_of(first: Evidence, of_node: Sequence[Evidence]) -> FailureClass:
    """The most telling class for a node: that it is lost, or that nothing can be started there, says less than why."""
    vague = (FailureClass.HOST, FailureClass.LAUNCHER, FailureClass.UNKNOWN)
    classes = [one.failure_class for one in of_node]
    telling = [found for found in classes if found not in vague]
    if telling:
        return telling[0]
    return FailureClass.HOST if FailureClass.HOST in classes else first.failure_class


def hard_evidence(case: Case) -> Verdict | None:
    """The kernel, Slurm's words in a log, or a lost heartbeat, unless a rank's own error came first."""
    said = next((one for one in case.roots if one.source == "log" and one.failure_class is not _NAN), None)
    hard = [one for one in case.roots if one.source in _HARD and one.failure_class not in _ENDINGS]
    hard = [one for one in hard if said is None or _beats(one, said)]
    hard = [one for one in hard if one.blame is not Blame.UNKNOWN] or hard
    if not hard:
        return None
    first = hard[0]
    if first.blame is Blame.NODE:
        return blame_nodes([one for one in hard if one.blame is Blame.NODE], case)
    return _as_told(first, case)


def _beats(hard: Evidence, said: Evidence) -> bool:
    slow = hard.source == "slurm" and hard.signature in LOST
    return before(hard, said, HARD_BEFORE_S if slow else CLOCKS_S) and together(hard, said, HARD_BEFORE_S)


def blame_nodes(group: Sequence[Evidence], case: Case) -> Verdict:
    """Every node of the group is left out for this job; none is drained, for a user could have written it."""
    nodes = nodes_of(group)
    shared = case.most(len(nodes))
    action = Action.EXCLUDE if nodes and not shared else Action.RESTART
    return Verdict(
        failure_class=_class_of(group[0], [one for one in group if one.node == group[0].node]),
        blame=Blame.UNKNOWN if shared else Blame.NODE,
        action=action,
        confidence=Confidence.LOW if shared else Confidence.MEDIUM,
        summary=sentences.many_alike(group[0], nodes) if shared else sentences.nodes_bad(group, action),
        nodes=() if shared else nodes,
        evidence=tuple(group),
    )


def first_root(case: Case) -> Verdict | None:
    """The earliest line of a rank that is not a victim's."""
    said = [one for one in case.roots if one.source == "log"]
    if not said:
        return None
    first = said[0]
    if first.blame is Blame.NODE:
        return blame_nodes([one for one in said if one.signature == first.signature and together(first, one)], case)
    return _as_told(first, case)


def _as_told(first: Evidence, case: Case) -> Verdict:
    """Take class, blame and action as the signature has them."""
    group = [one for one in case.roots if shape(one) == shape(first) and together(first, one)]
    told = Verdict(
        failure_class=first.failure_class,
        blame=first.blame,
        action=first.action,
        confidence=Confidence.LOW if first.blame is Blame.UNKNOWN else Confidence.MEDIUM,
        summary="",
        ranks=ranks_of(group),
        evidence=tuple(group),
    )
    nodes_own = first.signature in ALIKE or (first.signature in ONCE_RUN and (case.has_run or case.previous))
    if nodes_own and _on_few(group, case):
        unsure = replace(first, blame=Blame.UNKNOWN, action=Action.RESTART)
        told = replace(told, blame=Blame.UNKNOWN, action=Action.RESTART, confidence=Confidence.LOW)
        return replace(told, summary=sentences.as_told(unsure))
    if first.blame is Blame.PROGRAM:
        return replace(told, summary=sentences.program(first, group, case))
    return replace(told, summary=sentences.as_told(first))


def _on_few(group: Sequence[Evidence], case: Case) -> bool:
    """Whether this was seen on some nodes of the job, or nobody knows where, and not on most of them."""
    return len(case.nodes) > 1 and len(nodes_of(group)) * 2 <= len(case.nodes)


def killed(case: Case) -> Verdict | None:
    """A rank ended by SIGKILL, and nothing says by whom."""
    ends = [one for one in case.evidence if one.source == "exit"]
    told = ends or case.of("SL-TASK-KILLED", "SL-TASK-EXIT", "SL-TASK-SIG")
    own = [one for one in told if one.role is not Role.VICTIM or _one_task_killed(one)]
    if not own or own[0].signature not in ("EXIT-SIGKILL", "SL-TASK-KILLED"):
        return None
    exits = [one for one in own if one.signature == own[0].signature]
    first = exits[0]
    group = [one for one in exits if one.at == first.at] if first.at is not None else [first]
    return Verdict.unknown(sentences.killed(group), group, ranks_of(group))


def _one_task_killed(one: Evidence) -> bool:
    return one.signature == "SL-TASK-KILLED" and one.rank is not None and one.text.endswith("Killed")


def voted(case: Case) -> Verdict | None:
    """At least two victims, and more than half of those that name a peer, name the same node; nothing else spoke."""
    votes = {(one.node or one.rank or one.file, peer): one for one in case.victims for peer in one.peer_nodes}
    counts = Counter(peer for _, peer in votes)
    if not counts:
        return None
    suspect, count = counts.most_common(1)[0]
    left_by_itself = any(one.node == suspect for one in case.evidence if one.source == "exit")
    if count < 2 or count * 2 <= len(votes) or left_by_itself:
        return None
    group = [one for (_, peer), one in votes.items() if peer == suspect]
    return Verdict(
        failure_class=group[0].failure_class,
        blame=Blame.NODE,
        action=Action.EXCLUDE,
        confidence=Confidence.MEDIUM,
        summary=sentences.voted(suspect, count, len(votes)),
        nodes=(suspect,),
        evidence=tuple(group),
    )


def same_exit(case: Case) -> Verdict | None:
    """Every rank left with the same code of its own accord, and none of them complains of another: the program's."""
    exits = case.of("EXIT")
    complaints = [one for one in case.victims if one.source == "log"]
    if not exits or len(case.ranks) < 2 or complaints or set(ranks_of(exits)) < case.ranks:
        return None
    if any(by_signal(one) for one in case.evidence):
        return None
    if len({shape_of_exit(one) for one in exits}) != 1 or not all(together(exits[0], one) for one in exits):
        return None
    return Verdict(
        failure_class=FailureClass.USER_CODE,
        blame=Blame.PROGRAM,
        action=Action.STOP,
        confidence=Confidence.MEDIUM,
        summary=sentences.same_exit(exits),
        ranks=ranks_of(exits),
        evidence=tuple(exits),
    )


def shape_of_exit(one: Evidence) -> str:
    """What an exit says without the rank that says it: ``code 1``."""
    return one.text.rpartition(" with ")[2]


def first_exit(case: Case) -> Verdict | None:
    """A rank that left badly and gave no reason."""
    exits = [one for one in case.evidence if one.source == "exit" and one.role is not Role.VICTIM]
    exits = exits or case.of("SL-TASK-EXIT", "SL-TASK-SIG", "TE-EXIT", "TE-KILLED", "MPIRUN")
    if not exits:
        return None
    first = exits[0]
    group = [one for one in exits if one.at == first.at and one.signature == first.signature and first.at is not None]
    said = [one for one in case.victims if one.source == "log" and together(first, one)]
    group = group or [first]
    return Verdict.unknown(sentences.no_reason(first, said), [*group, *said], ranks_of(group))


def nothing(case: Case) -> Verdict:
    """No evidence, or none that decides: unknown, never a guess."""
    return Verdict.unknown(sentences.nothing(case.victims, case.of("SL-SRUN")))
