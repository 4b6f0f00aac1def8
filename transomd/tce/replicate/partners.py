"""Which node holds the copy of which node's checkpoints. Pure."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping


def partners(nodes: Iterable[str], topology: Mapping[str, str]) -> dict[str, str]:
    """The holder of each node's copy: never itself, and each node holds exactly one; {} for a single node.

    ``topology`` names the failure domain of a node; nodes that it does not name share one. The holder is in another
    domain wherever that is possible without one node holding two copies: always, unless a domain has more than half of
    the nodes; then for as many as can be. Within a domain the ring is that of the sorted names.
    """
    domains: dict[str, list[str]] = defaultdict(list)
    for node in sorted(set(nodes)):
        domains[topology.get(node, "")].append(node)
    groups = sorted(domains.values(), key=lambda group: (-len(group), group[0]))
    ring = [node for group in groups for node in group]
    if len(ring) < 2:
        return {}
    # Past the largest domain nobody meets its own: domains lie one after another, and none is longer.
    shift = len(groups[0]) if len(groups) > 1 else 1
    return {node: ring[(at + shift) % len(ring)] for at, node in enumerate(ring)}


def failure_domain(environ: Mapping[str, str] = os.environ) -> str:
    """The failure domain of this node as Slurm's topology has it: its leaf switch or block; '' in a flat network.

    slurmd sets ``SLURM_TOPOLOGY_ADDR`` (``core.leaf3.n17``) and its ``_PATTERN`` (``switch.switch.node``) for each task
    (srun(1)).
    """
    above = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node").split(".")[:-1]
    return ".".join(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[: len(above)])
