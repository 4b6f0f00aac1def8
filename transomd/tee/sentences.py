"""The one or two sentences of a verdict, for a person at three in the morning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from transomd.tee.case import Case, nodes_of, ranks_of
from transomd.tee.types import LATEST, Evidence
from transomd.words import Action, FailureClass

_NEXT = {
    Action.RESTART: "The job can start again on the same nodes.",
    Action.EXCLUDE: "The job can go on without {nodes}. No drain yet: Slurm or the probe has to confirm it first.",
    Action.DRAIN: "The job can go on without {nodes}.",
    Action.ROLLBACK: "The job has to go back to an earlier checkpoint.",
    Action.WAIT: "The job should wait until that is over; no node is blamed.",
    Action.STOP: "Started again it would end the same way: this is for its user to put right, and no node is blamed.",
    Action.NONE: "",
}

_STAMP = re.compile(r"^(?:\[?[IWEF]\d{3,4} [\d:.]{8,18} (?:\d+ )?\S{1,200}:\d+\] |[\dT:,. -]{10,32} )")

_KINDS = {
    FailureClass.GPU_HARDWARE: "a GPU fault",
    FailureClass.GPU_MEMORY: "a GPU memory fault",
    FailureClass.NVLINK: "an NVLink fault",
    FailureClass.NETWORK: "a network fault",
    FailureClass.STORAGE: "a storage fault",
    FailureClass.HOST_MEMORY: "a lack of memory",
    FailureClass.HOST: "a fault of the host",
    FailureClass.NUMERIC: "a value that is no number",
    FailureClass.CONFIG: "a wrong set-up",
    FailureClass.LAUNCHER: "trouble in starting the program",
    FailureClass.USER_CODE: "an error of the program or of its GPU",
}


def clock(at: float | None) -> str:
    """Return ``at 03:12:05`` in local time, with a space before it; nothing where the time is not known."""
    return "" if at is None or not 0 <= at < LATEST else datetime.fromtimestamp(at).strftime(" at %H:%M:%S")


def first_line(one: Evidence, limit: int = 160) -> str:
    """Return the first line of a piece of evidence, cut."""
    text = _STAMP.sub("", one.text.partition("\n")[0]).strip().rstrip(".")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Return ``n1, n2 and n3``."""
    shown = list(names[:limit]) + ([f"{len(names) - limit} more"] if len(names) > limit else [])
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "some ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + listed([str(rank) for rank in ranks])


def _where(one: Evidence) -> str:
    rank = f"rank {one.rank}" if one.rank is not None else ""
    node = f"on {one.node}" if one.node else ""
    return " ".join(part for part in (rank, node) if part)


def _who(one: Evidence) -> str:
    return _where(one) if one.rank is not None else f"a rank on {one.node}" if one.node else "the program"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _then(action: Action, nodes: Sequence[str] = ()) -> str:
    return _NEXT[action].format(nodes="it" if len(nodes) == 1 else "them")


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def ending(one: Evidence) -> str:
    """Slurm or a person ended the job."""
    said = {
        FailureClass.TIME_LIMIT: "The time limit was reached",
        FailureClass.PREEMPTION: "Slurm took the nodes for another job",
        FailureClass.CANCELLED: "A person cancelled the job",
    }[one.failure_class]
    after = {FailureClass.CANCELLED: "It is not started again."}.get(
        one.failure_class, "It can go on in a new allocation from its newest checkpoint."
    )
    return f"{said}{clock(one.at)}. {after}"


def fleet(nodes: Sequence[str], total: int) -> str:
    """Most nodes are gone at once."""
    return (
        f"{len(nodes)} of {total} nodes ({listed(nodes)}) stopped answering together, which points to a switch, the "
        f"network or power that they share, not to the nodes. {_then(Action.WAIT)}"
    )


def program(first: Evidence, group: Sequence[Evidence], case: Case) -> str:
    """An exception of the program."""
    ranks, nodes = ranks_of(group), nodes_of(group)
    failed = "ran out of memory" if first.failure_class is FailureClass.HOST_MEMORY else "failed"
    if case.ranks and set(ranks) >= case.ranks and len(ranks) > 1:
        who = f"Every rank ({len(ranks)}) {failed} in the same way"
    elif len(ranks) > 1:
        who = f"{len(ranks)} ranks on {len(nodes) or 1} node(s) {failed} in the same way"
    else:
        who = _sentence(f"{_who(first)} {failed}")
    return f"{who}{clock(first.at)}: {first_line(first)}. {_then(first.action)}"


def nodes_bad(evidence: Sequence[Evidence], action: Action) -> str:
    """Each node with what was found on it."""
    nodes = nodes_of(evidence)
    told = [_node(node, [one for one in evidence if one.node == node]) for node in nodes[:3]]
    if len(nodes) > 3:
        told.append(f"{len(nodes) - 3} more nodes failed too: {listed(nodes[3:])}.")
    if not nodes:
        told = [f"{_sentence(_KINDS.get(evidence[0].failure_class, 'a fault'))}: {first_line(evidence[0])}. "]
        told.append("The log does not say on which node.")
    return _join(*told, _then(action, nodes))


def _node(node: str, found: Sequence[Evidence]) -> str:
    parts = [_finding(one) for one in _distinct(found)[:3]]
    return f"Node {node} " + "; ".join(parts) + "."


def _distinct(found: Sequence[Evidence]) -> list[Evidence]:
    return list({one.signature: one for one in reversed(found)}.values())[::-1]


def _finding(one: Evidence) -> str:
    if one.signature == "HEARTBEAT-LOST":
        return f"stopped answering{clock(one.at)}"
    if one.signature == "SLURM-NODE-DOWN":
        return f"is {first_line(one, 100)} to Slurm"
    if one.signature in ("SL-NODEFAIL", "SL-NOTRESP"):
        return f"was reported lost by Slurm{clock(one.at)} ({first_line(one, 80)})"
    if one.source == "probe":
        return f"failed the check {first_line(one, 120)}"
    return f"shows {_KINDS.get(one.failure_class, 'a fault')}{clock(one.at)} ({first_line(one, 140)})"


def many_alike(first: Evidence, nodes: Sequence[str]) -> str:
    """The same fault on most nodes at once."""
    return (
        f"{len(nodes)} nodes show the same fault ({first_line(first, 120)}), so it is hardly any single node's. "
        f"{_then(Action.RESTART)}"
    )


def as_told(first: Evidence) -> str:
    """A line whose signature leaves the blame open, or gives it to something shared."""
    where = _where(first)
    place = f" on {where.removeprefix('on ')}" if where else ""
    kind = _sentence(_KINDS.get(first.failure_class, "a fault"))
    return f"{kind}{place}{clock(first.at)}: {first_line(first)}. {_then(first.action)}"


def killed(group: Sequence[Evidence]) -> str:
    """A rank ended by SIGKILL."""
    first = group[0]
    ranks = ranks_of(group)
    who = _sentence(_who(first) if len(group) == 1 else _ranks(ranks))
    were = "was" if 1 in (len(group), len(ranks)) else "were"
    return (
        f"{who} {were} killed by SIGKILL{clock(first.at)}. Nothing says by whom: there is no out-of-memory message "
        f"from the kernel or Slurm. {_then(Action.RESTART)}"
    )


def no_reason(first: Evidence, said: Sequence[Evidence]) -> str:
    """A rank that left without a word; ``said`` are the words of those that suffered from something."""
    heard = f"The first to complain was {_who(said[0])}: {first_line(said[0])}." if said else ""
    return _join(f"{_sentence(first_line(first))}{clock(first.at)}; no log says why.", heard, _then(Action.RESTART))


def same_exit(exits: Sequence[Evidence]) -> str:
    """All ranks left with one code."""
    code = exits[0].text.rpartition(" with ")[2]
    return f"Every rank ({len(exits)}) exited with {code}{clock(exits[0].at)}. {_then(Action.STOP)}"


def voted(suspect: str, count: int, total: int) -> str:
    """Most victims name one node."""
    return (
        f"{count} of {total} complaints about a lost peer name node {suspect}, and nothing else explains the failure. "
        f"{_then(Action.EXCLUDE, (suspect,))}"
    )


_STUCK = {
    "PROCESS-STOPPED": "is stopped (a signal such as SIGSTOP holds it)",
    "PROCESS-TRACED": "is held by a debugger",
    "PROCESS-UNINTERRUPTIBLE": "waits in the kernel, for a disk, a file system or a driver",
}


def stuck(found: Sequence[Evidence], said: Sequence[Evidence]) -> str:
    """Ranks whose processes cannot go on; ``said`` is what others raised who waited for them."""
    first = found[0]
    who = _where(first) if len(found) == 1 else _ranks(ranks_of(found))
    others = f"the others gave up waiting ({_who(said[0])}: {first_line(said[0], 120)})" if said else "the others wait"
    return f"The job stands still: {who} {_STUCK[first.signature]}, and {others}. {_then(Action.RESTART)}"


def hang(behind: Sequence[int], why: str, stalls: Sequence[Evidence], timeouts: Sequence[Evidence]) -> str:
    """Ranks wait for one another."""
    what = first_line(stalls[0]) if stalls else f"{len(timeouts)} rank(s) waited in vain for a collective operation"
    how = {"silent": "did not report a time-out as the others did", "sequence": "had done fewer operations"}.get(
        why, ""
    )
    guess = (
        f"{_sentence(_ranks(behind))} {how} and may hold up the rest."
        if behind
        else "Nothing says which rank is stuck."
    )
    return f"The job stands still: {what}. {guess} {_then(Action.RESTART)}"


def first_gone(silent: Sequence[int]) -> str:
    """Ranks that went without a word, and only the others complain."""
    return (
        f"{_sentence(_ranks(silent))} printed no error, while all others complain of a lost peer: something ended or "
        f"stopped {'it' if len(silent) == 1 else 'them'}, and no log says what. {_then(Action.RESTART)}"
    )


def operations_differ(timeouts: Sequence[Evidence]) -> str:
    """Ranks are in different operations at the same count."""
    return (
        f"Ranks disagree about which collective operation comes next ({first_line(timeouts[0], 120)}), as with uneven "
        f"batches or one rank in another branch. {_then(Action.STOP)}"
    )


def nothing(victims: Sequence[Evidence], srun: Sequence[Evidence]) -> str:
    """No cause was found; ``srun`` are words of srun that nobody knows."""
    seen = "No log, node or signal says anything."
    if victims:
        seen = f"Only consequences were seen, such as: {first_line(victims[0], 120)}."
    elif srun:
        seen = f"Nothing else was seen than: {first_line(srun[0], 120)}."
    return f"The cause is unknown. {seen} {_then(Action.RESTART)}"


def again_here(node: str) -> str:
    """The same fault on the same node."""
    return f"It is the second time on {node}, so the job should go on without it instead."


def again_everywhere() -> str:
    """The same fault, on most nodes each time."""
    return "It happened before, and each time on most nodes, so it is the program's: for its user to put right."


def again_elsewhere(node: str) -> str:
    """The same fault on another node."""
    return f"It happened before on another node than {node}, so it follows the program: for its user to put right."
