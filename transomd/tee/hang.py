"""Rules for jobs that stand still: which rank do the others wait for?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from transomd.tee import sentences
from transomd.tee.case import STUCK, Case, before, ranks_of, together
from transomd.tee.types import Evidence, Verdict
from transomd.words import Action, Blame, Confidence, FailureClass, Role

TIMEOUTS = ("PG-TIMEOUT", "GLOO-TIMEOUT")
_WORK = re.compile(r"SeqNum=(?P<seq>\d{1,18}), OpType=(?P<op>\w{1,40})")


def stuck_process(case: Case) -> Verdict | None:
    """A rank whose process is stopped, traced or waiting in the kernel, and no rank's error says why."""
    crashed = [one.rank for one in case.of("EXIT-SIGNAL") if one.role is not Role.VICTIM]  # it was dumping its core
    stuck = [one for one in case.stuck if one.rank not in crashed]
    signature = min((one.signature for one in stuck), key=STUCK.index, default="")
    found = [one for one in stuck if one.signature == signature]
    if not found or any(one.source == "log" and _says_why(one, found) for one in case.roots):
        return None
    said = [one for one in case.victims if one.source == "log" and before(one, found[0], 0)]
    summary = sentences.stuck(found, said)
    return Verdict.unknown(summary, [*found, *said], ranks_of(found), FailureClass.NCCL_HANG, Confidence.MEDIUM)


def _says_why(one: Evidence, stuck: Sequence[Evidence]) -> bool:
    """A node's fault counts where it is the stuck rank's or came with it: a process may hang in its GPU's driver."""
    if one.failure_class is FailureClass.STORAGE and stuck[0].signature == "PROCESS-UNINTERRUPTIBLE":
        return True
    near = any(one.node == other.node or together(one, other) for other in stuck)
    return one.blame is Blame.PROGRAM or (one.blame is Blame.NODE and near)


def missing_rank(case: Case) -> Verdict | None:
    """No progress, or collectives that timed out: name the ranks that are behind, if they can be told."""
    timeouts = case.of(*TIMEOUTS)
    stalls = case.of("NO-PROGRESS")
    if not timeouts and not stalls:
        return None
    behind, why = _behind(timeouts, case.ranks)
    if why == "operations":
        return Verdict(
            failure_class=FailureClass.USER_CODE,
            blame=Blame.PROGRAM,
            action=Action.STOP,
            confidence=Confidence.MEDIUM,
            summary=sentences.operations_differ(timeouts),
            ranks=behind,
            evidence=tuple(timeouts),
        )
    first = (timeouts or stalls)[0]
    decisive = [_suspect(rank, case, first, "is behind the others") for rank in behind]
    summary = sentences.hang(behind, why, stalls, timeouts)
    return Verdict.unknown(summary, decisive + stalls + timeouts, behind, FailureClass.NCCL_HANG)


def _suspect(rank: int, case: Case, first: Evidence, what: str) -> Evidence:
    """Say where the suspect is, so that the next failure can be compared with this one."""
    node = next((node for node, ranks in case.ranks_by_node.items() if rank in ranks), "")
    return Evidence(
        source="progress",
        signature="RANK-BEHIND",
        text=f"rank {rank} {what}",
        role=Role.CONTEXT,
        failure_class=first.failure_class,
        at=first.at,
        node=node,
        rank=rank,
    )


def _behind(timeouts: Sequence[Evidence], everyone: set[int]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that the others wait for and how that is known: silent, sequence, operations, or not at all."""
    if silent := silent_ranks(timeouts, everyone):
        return silent, "silent"
    work = {one.rank: match for one in timeouts if one.rank is not None and (match := _WORK.search(one.text))}
    if len(work) < 2:
        return (), ""
    lowest = min(int(match["seq"]) for match in work.values())
    late = [rank for rank, match in work.items() if int(match["seq"]) == lowest]
    if len(late) < len(work):
        return (tuple(sorted(late)), "sequence") if len(late) * 2 <= len(work) else ((), "")
    operations = Counter(match["op"] for match in work.values())
    if len(operations) > 1:
        rare = operations.most_common()[-1][0]
        return tuple(sorted(rank for rank, match in work.items() if match["op"] == rare)), "operations"
    return (), ""


def silent_ranks(complaints: Sequence[Evidence], everyone: set[int]) -> tuple[int, ...]:
    """Return the few ranks that do not complain while the others do; none if the complaints come from few."""
    waiting = set(ranks_of(complaints))
    silent = everyone - waiting
    return tuple(sorted(silent)) if waiting and len(silent) * 2 <= len(everyone) else ()


def first_gone(case: Case) -> Verdict | None:
    """All complain of a lost peer but a few ranks that say nothing: those went first, and why is not known."""
    silent = silent_ranks(case.victims, case.ranks)
    if not silent:
        return None
    found = [_suspect(rank, case, case.victims[0], "printed no error while the others lost a peer") for rank in silent]
    return Verdict.unknown(sentences.first_gone(silent), found, silent)
