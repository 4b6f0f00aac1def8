"""Who holds whose copy: everybody one, nobody its own, in another failure domain wherever that can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transomd.tce.replicate.partners import failure_domain, partners

NODES = st.lists(st.integers(0, 60).map("n{}".format), min_size=1, max_size=40, unique=True)
TOPOLOGY = st.dictionaries(st.integers(0, 60).map("n{}".format), st.sampled_from(["a", "b", "c", "d"]), max_size=61)


@given(NODES, TOPOLOGY)
def test_each_has_one_and_holds_one_and_never_its_own(nodes: list[str], topology: dict[str, str]) -> None:
    found = partners(nodes, topology)
    if len(nodes) == 1:
        assert found == {}
        return
    assert sorted(found) == sorted(found.values()) == sorted(nodes)
    assert all(node != holder for node, holder in found.items())


@given(NODES, TOPOLOGY)
def test_as_many_as_can_be_are_in_another_domain(nodes: list[str], topology: dict[str, str]) -> None:
    sizes = Counter(topology.get(node, "") for node in nodes)
    abroad = sum(topology.get(a, "") != topology.get(b, "") for a, b in partners(nodes, topology).items())
    largest = max(sizes.values())
    others = len(nodes) - largest
    assert abroad == (len(nodes) if largest <= others else 2 * others)


@given(NODES, TOPOLOGY)
def test_the_order_of_the_nodes_does_not_matter(nodes: list[str], topology: dict[str, str]) -> None:
    assert partners(nodes, topology) == partners(reversed(nodes), topology)


def test_without_topology_it_is_the_next_in_the_ring() -> None:
    assert partners(["n3", "n1", "n2"], {}) == {"n1": "n2", "n2": "n3", "n3": "n1"}


def test_the_ring_closes_when_a_node_leaves() -> None:
    assert partners(["n1", "n3"], {}) == {"n1": "n3", "n3": "n1"}


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("core.leaf3.n17", "switch.switch.node", "core.leaf3"),
        ("leaf3.n17", "switch.node", "leaf3"),
        ("n17", "node", ""),
        ("n17.cluster.example", "node", ""),
    ],
)
def test_the_domain_is_the_leaf_switch(address: str, pattern: str, domain: str) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert failure_domain(environ) == domain
    assert failure_domain({}) == ""
