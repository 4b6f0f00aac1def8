"""Makes evidence comparable before it is judged: placed on nodes of the job, on one clock, limited to the failure."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transomd.tee.types import LATEST, Evidence, Verdict
from transomd.words import Blame, Role

WINDOW_S = 3600.0
"""Evidence that much older than the last is not of this failure; a collective time-out takes 10 to 30 minutes."""

TOGETHER_S = 60.0
"""Lines within this time of one another are one event."""

LOST = frozenset({"HEARTBEAT-LOST", "SLURM-NODE-DOWN", "SL-NODEFAIL", "SL-NOTRESP"})
"""Signatures that say that a node is gone."""

STUCK = ("PROCESS-STOPPED", "PROCESS-TRACED", "PROCESS-UNINTERRUPTIBLE")
"""Signatures that say that a process cannot go on, the most telling first."""

_STRENGTH = ("probe", "slurm", "kernel", "heartbeat", "process", "log", "exit", "progress")
_ADDRESS = re.compile(r"[\d.]+|[0-9a-fA-F:.%]*:[0-9a-fA-F:.%]*")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure as the rules see it: evidence in the order of time, all of it on nodes of the job.

    ``has_run`` is set where the program is known to have worked before, in this launch or an earlier one.
    """

    evidence: tuple[Evidence, ...]
    nodes: tuple[str, ...]
    ranks_by_node: Mapping[str, Sequence[int]]
    previous: tuple[Verdict, ...] = ()
    has_run: bool = False

    @property
    def roots(self) -> list[Evidence]:
        """What may be a cause, earliest first."""
        return [one for one in self.evidence if one.role is Role.ROOT]

    @property
    def victims(self) -> list[Evidence]:
        """What was printed by those who suffer."""
        return [one for one in self.evidence if one.role is Role.VICTIM]

    def of(self, *signatures: str) -> list[Evidence]:
        """Evidence with one of these signatures, earliest first."""
        return [one for one in self.evidence if one.signature in signatures]

    @property
    def stuck(self) -> list[Evidence]:
        """Processes that cannot go on: of ranks, not what a rank has left behind whose own end was told before."""
        ends = [one for one in self.evidence if one.source == "exit" and one.rank is not None]
        found = self.of(*STUCK)
        return [one for one in found if not any(end.rank == one.rank and before(end, one, 0) for end in ends)]

    @property
    def ranks(self) -> set[int]:
        """Every rank of the job, where that is known."""
        return {rank for ranks in self.ranks_by_node.values() for rank in ranks}

    def most(self, count: int) -> bool:
        """Whether ``count`` nodes are so many of the job's that they share something."""
        return count > 2 and count * 2 > len(self.nodes)


def prepare(
    evidence: Sequence[Evidence],
    nodes: Sequence[str],
    ranks_by_node: Mapping[str, Sequence[int]],
    previous: Sequence[Verdict],
    addresses: Mapping[str, str],
    has_run: bool = False,
) -> Case:
    """Return the case: evidence about foreign nodes loses its node, what is too old is left out, the rest is sorted."""
    node_of = {rank: node for node, ranks in ranks_by_node.items() for rank in ranks}
    known = {name: node for node in nodes for name in (node, node.partition(".")[0])}
    known |= {address: node for address, node in addresses.items() if node in nodes}
    placed = [_place(one, known, node_of) for one in evidence]
    recent = _recent(placed)
    single = len({one.file for one in recent if one.file}) == 1
    return Case(
        evidence=tuple(sorted(recent, key=lambda one: _order(one, single))),
        nodes=tuple(nodes),
        ranks_by_node=ranks_by_node,
        previous=tuple(previous),
        has_run=has_run,
    )


def _place(one: Evidence, known: Mapping[str, str], node_of: Mapping[int, str]) -> Evidence:
    """Name nodes as the job does. Once its nodes are known, a name that is none of them is nobody's to blame."""
    node = _known(one.node, known) or (node_of.get(one.rank, "") if one.rank is not None else "")
    named = [_known(peer, known) for peer in one.peer_nodes] + [node_of.get(rank, "") for rank in one.peer_ranks]
    peers = tuple(dict.fromkeys(peer for peer in named if peer and peer != node))
    foreign = bool(one.node) and not node and one.blame is Blame.NODE
    role = Role.CONTEXT if foreign else one.role
    at = one.at if one.at is not None and 0 <= one.at < LATEST else None
    return replace(one, node=node, peer_nodes=peers, role=role, at=at)


def _known(name: str, known: Mapping[str, str]) -> str:
    if not known:
        return "" if _ADDRESS.fullmatch(name) else name
    return known.get(name.partition("%")[0]) or known.get(name.partition(".")[0], "")


def by_address(address_of: Mapping[str, str]) -> dict[str, str]:
    """Return the node of each address that is one node's alone; a loopback address is everybody's own."""
    shared = Counter(address_of.values())
    return {address: node for node, address in address_of.items() if shared[address] == 1 and _is_far(address)}


def _is_far(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _recent(evidence: Sequence[Evidence]) -> list[Evidence]:
    times = [one.at for one in evidence if one.at is not None]
    if not times:
        return list(evidence)
    oldest = max(times) - WINDOW_S
    return [one for one in evidence if one.at is None or one.at >= oldest or not one.forgeable]


def _order(one: Evidence, single: bool) -> tuple[float, int, int, str, int]:
    at = one.at if one.at is not None else float("inf")
    strength = _STRENGTH.index(one.source) if one.source in _STRENGTH else len(_STRENGTH)
    line = one.line or 0
    return (at, line if single else 0, strength, one.file, line)


def shape(one: Evidence) -> tuple[str, str]:
    """What makes two exceptions the same: the signature, and the first line without its numbers."""
    return one.signature, _NUMBERS.sub("#", one.text.partition("\n")[0])


def together(first: Evidence, other: Evidence, seconds: float = TOGETHER_S) -> bool:
    """Whether ``other`` came within ``seconds`` of ``first``; what has no time counts as then."""
    return first.at is None or other.at is None or abs(other.at - first.at) <= seconds


def before(one: Evidence, other: Evidence, slack: float) -> bool:
    """Whether ``one`` came before ``other``, or at most ``slack`` seconds after it; True if either has no time."""
    return one.at is None or other.at is None or one.at <= other.at + slack


def nodes_of(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """The nodes on which these were seen, in order and each once."""
    return tuple(dict.fromkeys(one.node for one in evidence if one.node))


def ranks_of(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that printed or suffered these, sorted."""
    return tuple(sorted({one.rank for one in evidence if one.rank is not None}))
