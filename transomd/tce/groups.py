"""Which ranks hold the same of a state: as declared, and as the placements of DTensors say. Nobody is asked for it.

The ranks of a group have one part together. Its first rank writes it to storage, in memory it is once on each node.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transomd.tce.errors import CheckpointError
from transomd.tce.files import digest

if TYPE_CHECKING:
    from transomd.tce.shards import Deal

Ranks = tuple[int, ...]
Replicated = Iterable[str] | bool | Mapping[str, Any]
"""Names of top-level keys, True for all, or for each key the ranks (or their process group) that hold the same."""


def first_of_node(ranks: Ranks, before: Ranks) -> bool:
    """Whether a rank, one of ``ranks`` (in their order), is the first of them on its node.

    ``before``: the ranks of the node that come before it.
    """
    return not any(ranks[at : at + 1] == (rank,) for rank in before for at in (bisect_left(ranks, rank),))


class Groups:
    """The groups that one rank belongs to, by the names of their parts."""

    def __init__(self, replicated: Replicated, rank: int, world_size: int) -> None:
        """CheckpointError names every key whose ranks cannot be right."""
        self._rank = rank
        self._own, self._all = f"rank-{rank:05d}", "replica-00000"
        self._ranks: dict[str, Ranks] = {self._own: (rank,), self._all: tuple(range(world_size))}
        self._everything = replicated is True
        self._declared: dict[str, str] = {}
        self._dealt: dict[tuple[str, Deal], str] = {}
        if isinstance(replicated, Mapping):
            self._declare(replicated)
        elif not isinstance(replicated, bool):
            self._declared = dict.fromkeys((replicated,) if isinstance(replicated, str) else replicated, self._all)

    def ranks(self, name: str) -> Ranks:
        """The ranks that load a part of this name, in their order."""
        return self._ranks[name]

    def check(self, keys: Collection[str]) -> None:
        """CheckpointError if a key was declared that the state does not hold."""
        missing = self._declared.keys() - set(keys)
        if missing:
            raise CheckpointError(
                f"replicated names {', '.join(sorted(missing))}, which the state does not hold",
                hint=f"the state holds {', '.join(sorted(keys))}",
            )

    def name_of(self, key: str, deal: Deal | None = None) -> str:
        """The name of the part for what is under a top-level key, or for a DTensor under it.

        Placements say more of a DTensor than a declaration does, which counts only where the mesh knows of no other
        rank that holds the same, and nothing of the ranks that are declared.
        """
        home = self._all if self._everything else self._declared.get(key, self._own)
        if deal is None:
            return home
        name = self._dealt.get((home, deal))
        if name is None:
            name = self._dealt[home, deal] = self._name_of_deal(home, deal)
        return name

    def _name_of_deal(self, home: str, deal: Deal) -> str:
        same = deal.same or (self._rank,)
        if self._rank not in same or same[-1] >= len(self._ranks[self._all]):
            raise CheckpointError(
                f"this is rank {self._rank} of {len(self._ranks[self._all])}, but a DTensor's mesh knows it as one of "
                f"{_listed(same)}",
                hint="give the engine the rank and the world size of torch.distributed, or neither",
            )
        if len(same) == 1 and deal.ranks.isdisjoint(other for other in self._ranks[home] if other != self._rank):
            return home
        return self._name(same)

    def _name(self, ranks: Ranks) -> str:
        """The same on all of these ranks, and another for any others."""
        if len(ranks) == len(self._ranks[self._all]):
            return self._all
        if len(ranks) == 1:
            return self._own
        name = f"replica-{ranks[0]:05d}-{digest(_listed(ranks).encode())[:8]}"
        self._ranks[name] = ranks
        return name

    def _declare(self, replicated: Mapping[str, Any]) -> None:
        faults = []
        for key, told in replicated.items():
            ranks = _ranks_of(told)
            if ranks is None:
                faults.append(f"{key}: {told!r} is neither ranks nor a process group that this rank belongs to")
            elif self._rank not in ranks or ranks[0] < 0 or ranks[-1] >= len(self._ranks[self._all]):
                faults.append(f"{key}: the ranks {_listed(ranks)} must lie in the world and include {self._rank}")
            else:
                self._declared[key] = self._name(ranks)
        if faults:
            raise CheckpointError(
                f"replicated on rank {self._rank} of {len(self._ranks[self._all])}: {'; '.join(faults)}",
                hint="name for each key the ranks that hold the same as this one; leave out what no other rank holds",
            )


def _ranks_of(told: Any) -> Ranks | None:
    """The ranks that are declared, in their order, each once."""
    try:
        if not isinstance(told, Iterable):
            told = sys.modules["torch.distributed"].get_process_group_ranks(told)
        ranks = tuple(sorted({int(rank) for rank in told}))
    except (TypeError, ValueError, KeyError, RuntimeError):
        return None
    return ranks or None


def _listed(ranks: Ranks) -> str:
    return ",".join(map(str, ranks))
