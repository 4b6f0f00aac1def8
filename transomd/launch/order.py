"""Which node runs which ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def arrange(nodes: Collection[str], before: Sequence[str], slurm: Sequence[str]) -> list[str]:
    """The nodes of a launch in the order of their ranks: those of the launch ``before`` keep theirs.

    Whoever takes the place of a lost node gets its ranks, so that every other rank finds in its node's memory what it
    staged there. ``slurm`` is the allocation in Slurm's own order, which is that of a first launch.
    """
    wanted = [node for node in slurm if node in nodes]
    if len(before) != len(wanted):
        return wanted
    new = iter([node for node in wanted if node not in before])
    return [node if node in wanted else next(new) for node in before]
