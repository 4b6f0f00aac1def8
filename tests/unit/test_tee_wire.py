"""Evidence and verdicts over the wire: what is wrong is refused by name, and nobody vouches for himself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transomd.tee.types import MAX_TEXT, Evidence, Verdict
from transomd.tee.wire import MAX_EVIDENCE, MAX_NAMES, read_evidence, read_verdict
from transomd.words import Action, Blame, Confidence, FailureClass, Role

EVIDENCE = Evidence(
    source="kernel",
    signature="XID-79",
    text="GPU has fallen off the bus",
    role=Role.ROOT,
    failure_class=FailureClass.GPU_HARDWARE,
    blame=Blame.NODE,
    action=Action.DRAIN,
    at=0.0,
    node="n2",
    rank=0,
    peer_nodes=("n3",),
    peer_ranks=(0, 4),
    file="dmesg",
    line=3,
    count=2,
    forgeable=False,
)
VERDICT = Verdict(
    failure_class=FailureClass.GPU_HARDWARE,
    blame=Blame.NODE,
    action=Action.DRAIN,
    confidence=Confidence.HIGH,
    summary="Node n2 is bad.",
    nodes=("n2",),
    ranks=(0,),
    drainable=("n2",),
    evidence=(EVIDENCE,),
)


def over_the_wire(data: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read


def test_our_own_database_gives_back_what_was_written() -> None:
    assert read_evidence(over_the_wire(EVIDENCE.to_json()), trusted=True) == EVIDENCE
    assert read_verdict(over_the_wire(VERDICT.to_json()), trusted=True) == VERDICT


def test_a_sender_cannot_vouch_for_itself() -> None:
    assert read_evidence(over_the_wire(EVIDENCE.to_json())).forgeable
    told = read_verdict(over_the_wire(VERDICT.to_json()))
    assert told.drainable == ()
    assert told.evidence[0].forgeable


def test_unknown_keys_are_dropped_and_lists_and_texts_are_cut() -> None:
    data = {
        **EVIDENCE.to_json(),
        "text": "x" * 10_000,
        "node": "n" * 10_000,
        "peer_nodes": ["n"] * 10_000,
        "peer_ranks": [1] * 100_000,
        "from_the_future": {"a": 1},
    }
    read = read_evidence(data)
    assert (len(read.text), len(read.peer_nodes)) == (MAX_TEXT, MAX_NAMES)
    assert len(read.node) < 300
    assert len(read.peer_ranks) < 2000
    many = {**VERDICT.to_json(), "evidence": [EVIDENCE.to_json()] * 1000}
    assert len(read_verdict(many).evidence) == MAX_EVIDENCE


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("role", "boss", "role: 'boss' is none of: root, victim, context"),
        ("role", None, "role: "),
        ("role", ["root"], "role: "),
        ("failure_class", 7, "failure_class: "),
        ("text", 7, "text: expected text"),
        ("node", ["n1"], "node: expected text"),
        ("rank", "1", "rank: expected a number"),
        ("rank", True, "rank: expected a number"),
        ("rank", 10**30, "rank: expected a number"),
        ("at", "now", "at: expected Unix seconds"),
        ("at", float("nan"), "at: expected Unix seconds"),
        ("at", float("inf"), "at: expected Unix seconds"),
        ("at", -1.0, "at: expected Unix seconds"),
        ("at", 1e12, "at: expected Unix seconds"),
        ("at", 10**400, "at: expected Unix seconds"),
        ("peer_nodes", "n1", "peer_nodes: expected a list"),
        ("peer_nodes", [1], "peer_nodes: expected text"),
        ("peer_ranks", ["1"], "peer_ranks: expected a number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_evidence({**EVIDENCE.to_json(), key: value})


@pytest.mark.parametrize("data", [None, 3, "x", [], [1]])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        read_evidence(data)
    with pytest.raises(ValueError, match="expected an object"):
        read_verdict({**VERDICT.to_json(), "evidence": [data]})


def test_texts_come_out_fit_to_be_stored_and_shown() -> None:
    read = read_evidence({**EVIDENCE.to_json(), "text": "a\x1b[2J\ud800\u202eb\nc", "node": "n\x00"})
    assert read.text == "a [2J? b\nc"
    assert read.node == "n "
    read.text.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*EVIDENCE.to_json(), "other"]), JSON))
def test_any_object_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        read = read_evidence({**EVIDENCE.to_json(), **changes})
    except ValueError:
        return
    assert read_evidence(over_the_wire(read.to_json())) == read
