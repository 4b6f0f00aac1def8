"""When each node was last put back into service: what its kernel log said before was dealt with by a person.

A drain that is gone was lifted by somebody, by ``transom undrain`` or by ``scontrol update state=resume``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transom_sql.records import Event, NodeRecord
from transom_sql.store import Change, Store

from transomd.tol.view import SlurmView

KEY = "cleared_at"
"""Where a node's record holds the time (Unix seconds)."""


class Clearings:
    """``at`` is the time by node, kept up to date in place: whoever probes nodes may hold on to it."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self._drained: set[str] = set()

    def load(self, records: Iterable[NodeRecord]) -> None:
        """Take up what is recorded; a drain of our own may have been lifted while this daemon was away."""
        for record in records:
            told = record.data.get(KEY)
            if told is not None:
                self.at[record.name] = float(told)
            if record.drain_reason and (record.drain_time or 0.0) > self.at.get(record.name, 0.0):
                self._drained.add(record.name)

    def note(self, node: str, at: float) -> None:
        """Note that a node was put back into service."""
        self.at[node] = at
        self._drained.discard(node)

    def look(self, slurm: SlurmView) -> list[str]:
        """Return the nodes whose drain is gone, until that is noted. Unknown changes nothing."""
        nodes = slurm.nodes
        if nodes is None:
            return []
        # A time that is still to come is from before the clock was set back; what the kernel says from now on counts.
        self.at.update({name: slurm.nodes_at for name, at in self.at.items() if at > slurm.nodes_at})
        lifted = sorted(name for name in self._drained if name in nodes and not nodes[name].status.drain)
        self._drained |= {name for name, node in nodes.items() if node.status.drain}
        return lifted


def record_lifted(store: Store, names: Iterable[str], at: float) -> None:
    """Record that drains are gone, with an event each; on the store's thread."""
    nodes, events = [], []
    for name in names:
        old = store.node(name) or NodeRecord(name=name, changed_at=at)
        nodes.append(replace(old, data={**old.data, KEY: at}))
        said = f"{name} is back in service; what its kernel log said before counts no more"
        events.append(Event(at=at, kind="cleared", node=name, message=said))
    store.commit(Change(nodes=nodes, events=events))
