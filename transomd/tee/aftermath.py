"""Which exceptions came of an end, and are none of its causes: what others raise once one is gone or stuck. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from transomd.tee.case import Case, ranks_of, shape
from transomd.tee.types import Evidence
from transomd.words import Role

TOLD_S = 5.0
"""How much later than its peers notice srun may tell of a rank's end, and we read it."""

_GENERIC = ("PY-EXCEPTION", "PY-GENERIC", "PY-NOFILE", "PY-REMOTE", "PY-CKPT-CORRUPT")
"""Exceptions that no signature knows, whose meaning is their program's secret; and those that a peer that is gone also
causes: a file that it did not write, a server that it was, a message that it did not end."""

_ENDS = ("NO-PROGRESS", "TE-KILLED", "TE-EXIT", "PY-SPAWN-KILLED", "SL-ABORT")
"""Besides exits, what says that a rank had ended, or was about to be; launchers of ranks and srun tell of them, too."""

_ABORT = re.compile(r"SIGABRT|\(exitcode: -6\)")
_LOCAL_RANK = re.compile(r"local_rank: (\d{1,6})")


def consequences(case: Case) -> Case:
    """Take exceptions that nobody knows for their victims' where another rank was stuck, or had ended before."""
    return _after_the_end(_of_the_stuck(case))


def _of_the_stuck(case: Case) -> Case:
    """Take them so where a rank cannot go on and has raised nothing: the others waited for it in vain.

    Since when it is stuck nobody knows, so that times say nothing here. What every rank has raised, or a rank before it
    got stuck, may be why; a rank at its teardown is not stuck. One that writes its core after an abort may answer what
    few others raised, or be what many others answer.
    """
    alike = _alike(case)
    spoke = {rank for group in alike.values() for rank in ranks_of(group)}
    silent = set(ranks_of(case.stuck)) - spoke
    if not silent:
        return case
    aborted = set(ranks_of([one for one in case.of("EXIT-SIGNAL") if _ABORT.search(one.text)]))
    over = {key for key, group in alike.items() if silent - aborted or len(ranks_of(group)) > len(aborted)}
    return _victims(case, {key for key in over if not _raised_by(None, alike[key], case)})


def _after_the_end(case: Case) -> Case:
    """Take them so once another rank had ended badly, or a hang was ended.

    A program may say in its own words that a peer is gone. srun tells of ends in their order, and nobody ends a rank by
    a signal because of another's exception before that one has ended. But with an abort, or an exit, a rank may itself
    answer another's exception: those count only for what comes later.
    """
    end = next((one for one in case.evidence if one.source == "exit" or one.signature in _ENDS), None)
    if end is None:
        return case
    ended = _rank_ended(end, case)
    later = {
        key
        for key, group in _alike(case).items()
        if all(_came_after(one, end) for one in group) and not _raised_by(ended, group, case)
    }
    return _victims(case, later)


def _victims(case: Case, shapes: Collection[tuple[str, str]]) -> Case:
    told = (replace(one, role=Role.VICTIM) if _generic(one) and shape(one) in shapes else one for one in case.evidence)
    return replace(case, evidence=tuple(told))


def _generic(one: Evidence) -> bool:
    return one.role is Role.ROOT and one.signature in _GENERIC


def _alike(case: Case) -> dict[tuple[str, str], list[Evidence]]:
    """The exceptions that nobody knows, those that are the same together."""
    groups: dict[tuple[str, str], list[Evidence]] = {}
    for one in filter(_generic, case.evidence):
        groups.setdefault(shape(one), []).append(one)
    return groups


def _rank_ended(end: Evidence, case: Case) -> int | None:
    """Return the rank that this tells of; torchrun says which one of its node's it was."""
    local = _LOCAL_RANK.search(end.text)
    ranks = case.ranks_by_node.get(end.node, ())
    if end.rank is not None or local is None or int(local[1]) >= len(ranks):
        return end.rank
    return sorted(ranks)[int(local[1])]


def _raised_by(ended: int | None, group: Sequence[Evidence], case: Case) -> bool:
    """Whether the rank that ended had raised this itself, as one of the group or because there is none that did not."""
    ranks = len(case.ranks)
    nameless = sum(one.count for one in group if one.rank is None)
    return (ended is not None and ended in ranks_of(group)) or 1 < ranks <= nameless + len(ranks_of(group))


def _came_after(one: Evidence, end: Evidence) -> bool:
    """What has no stamp of its own has the time at which it was read, and torchrun's words their own, earlier one."""
    if one.at is None or end.at is None:
        return False
    if by_signal(end) and not _ABORT.search(end.text):
        return one.at >= end.at - TOLD_S
    if one.file == end.file and one.line and end.line:
        return one.line > end.line and one.at > end.at
    return one.at > end.at + (TOLD_S if end.source == "log" else 0)


def by_signal(end: Evidence) -> bool:
    """Whether this says that a rank did not leave of its own accord."""
    if end.signature == "TE-EXIT":
        return "(exitcode: -" in end.text
    return end.signature in ("EXIT-SIGKILL", "EXIT-SIGNAL", "TE-KILLED", "PY-SPAWN-KILLED")
