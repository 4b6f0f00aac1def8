"""What a pause withholds, and when a budget trips: pure decisions."""

from __future__ import annotations

from typing import Any

import pytest
from transom_slurm.types import NodeStatus, SlurmNode
from transom_sql.records import Attempt, Incident, Intent, Job, Switch

from transomd.api.wire import Directive, Grant, LauncherReport, LaunchOrder, LaunchReport
from transomd.settings import DrainSettings
from transomd.spec import JobSpec
from transomd.tol.admit import Admission, admit_drains
from transomd.tol.drains import drain_intent
from transomd.tol.switches import counted_since, held_directive, pause_sentence, trip_sentence, tripped, withheld
from transomd.tol.view import JobView, SlurmView, stay
from transomd.words import JobState

NOW = 1_800_000_000.0
SPEC = JobSpec.from_stored({"name": "demo", "command": "true", "nodes": 2})


def view(*, cancelled: str = "", **data: Any) -> JobView:
    job = Job(
        id=1, name="demo", user="ann", uid=1000, spec={}, run_dir="/r", cwd="/", token_sha256="0" * 64,
        state=JobState.RECOVERING.value, reason="", created_at=NOW, changed_at=NOW, cancel_requested_by=cancelled,
    )  # fmt: skip
    return JobView(job=job, spec=SPEC, attempts=(attempt(**data),))


def attempt(**data: Any) -> Attempt:
    return Attempt(job_id=1, number=1, tag="demo", created_at=NOW, slurm_job_id=7, nodes=("n1", "n2", "n3"), data=data)


def an_intent(kind: str, **args: Any) -> Intent:
    return Intent(key=f"{kind}:1", kind=kind, state="pending", created_at=NOW, job_id=1, args=args)


ORDER = {"epoch": 2, "nodes": ["n1", "n3"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"intents": (an_intent("submit", attempt=2),)}, "submit attempt 2"),
        ({"intents": (an_intent("cancel", slurm_job_id=7),)}, "cancel Slurm job 7"),
        ({"intents": (an_intent("fence", nodes=["n2", "n3"]),)}, "fence n[2-3]"),
        ({"intents": (an_intent("launcher", host="n1"),)}, "start a launcher on n1"),
        ({"attempts": (attempt(order=ORDER),)}, "start epoch 2 on n[1,3]"),
        ({"attempts": (attempt(fence={"epoch": 1, "reason": "x"}),)}, "end epoch 1"),
        ({"attempts": (attempt(host="n1"),)}, ""),
    ],
)
def test_a_decision_that_would_act_is_withheld(changes: dict[str, Any], said: str) -> None:
    before = view()
    assert withheld(before, stay(before, **changes)) == said


def test_an_order_that_is_recorded_already_is_no_new_act() -> None:
    before = view(order=ORDER)
    assert withheld(before, stay(before, attempts=(attempt(order=ORDER, host="n1"),))) == ""


def test_what_a_user_asked_for_is_not_withheld() -> None:
    before = view(cancelled="ann")
    assert withheld(before, stay(before, intents=(an_intent("cancel", slurm_job_id=7),))) == ""
    assert withheld(before, stay(before, intents=(an_intent("submit", attempt=1),))) == "submit attempt 1"


def report(phase: str, *epochs: int) -> LauncherReport:
    launches = [LaunchReport(epoch=epoch, nodes=["n1"], started_at=NOW) for epoch in epochs]
    return LauncherReport(
        job_id=1, attempt=1, slurm_job_id=7, generation=1, host="n1", phase=phase, at=NOW, launches=launches
    )


OPEN = Directive(
    gate="open",
    launch=LaunchOrder(epoch=2, nodes=["n1"]),
    fence_epoch=1,
    stop="give up",
    grant=Grant(restarts=2, for_s=600),
)


def test_a_launcher_starts_ends_and_is_granted_nothing() -> None:
    held = held_directive(OPEN, report("failed", 1), view(), "paused")
    assert (held.gate, held.launch, held.fence_epoch, held.stop) == ("hold", None, None, "")
    assert held.grant == Grant(restarts=0, for_s=0.0)
    assert held.message == "paused"


def test_a_launch_that_runs_goes_on() -> None:
    held = held_directive(OPEN, report("running", 1, 2), view(), "paused")
    assert (held.gate, held.launch) == ("open", OPEN.launch)


@pytest.mark.parametrize(
    ("answer", "phase", "cancelled"),
    [(OPEN, "done", ""), (OPEN, "running", "ann"), (Directive(gate="refuse"), "gate", "")],
)
def test_an_end_that_is_nobodys_act_is_told_as_ever(answer: Directive, phase: str, cancelled: str) -> None:
    assert held_directive(answer, report(phase), view(cancelled=cancelled), "paused") is answer


def test_sentences() -> None:
    paused = Switch(name="pause", changed_at=NOW, since=NOW, who="ann", reason="rack move")
    assert pause_sentence(paused) == "transom is paused by ann: rack move"
    assert pause_sentence(None) == pause_sentence(Switch(name="pause", changed_at=NOW, who="bob")) == ""
    told = trip_sentence({"drain-budget:per_hour": tripped("per_hour", "4 nodes", NOW), "pause": paused})
    assert told == "drain.per_hour is tripped: 4 nodes (transom resume-actions resets it)"


# --- budgets ------------------------------------------------------------------------------------------------------


def fleet(count: int = 20, drained: tuple[str, ...] = ()) -> SlurmView:
    nodes = {}
    for number in range(count):
        name = f"n{number}"
        flags = frozenset({"DRAIN"}) if name in drained else frozenset()
        nodes[name] = SlurmNode(name=name, status=NodeStatus("IDLE", flags), state_text="IDLE")
    return SlurmView(nodes=nodes, nodes_at=NOW)


def proposal(node: str, incident: int) -> Intent:
    found = Incident(id=incident, job_id=1, attempt=1, epoch=1, detected_at=NOW, summary="lost", data={})
    return drain_intent(found, node, "node-loss", NOW)


def past(node: str, incident: int, at: float, check: str = "node-loss") -> Intent:
    args = {"node": node, "check": check}
    return Intent(
        key=f"drain:{node}:{incident}", kind="drain", state="done", created_at=at, incident_id=incident, args=args
    )


def admit(history: list[Intent], *nodes: str, slurm: SlurmView | None = None, **more: Any) -> Admission:
    budget = DrainSettings(per_hour=2, per_incident=1, max_fraction=0.2)
    proposals = [proposal(node, 100 + number) for number, node in enumerate(nodes)]
    return admit_drains(proposals, history, slurm or fleet(), budget, NOW, **more)


def test_an_hour_that_is_used_up_trips() -> None:
    found = admit([past("n1", 1, NOW - 60)], "n2", "n3", "n4")
    assert [intent.args["node"] for intent in found.granted] == ["n2"]
    assert [refusal.cause for refusal in found.refused] == ["per_hour", "per_hour"]
    assert [trip.budget for trip in found.trips] == ["per_hour"]
    assert found.trips[0].reason == "2 nodes were drained within the hour (drain.per_hour = 2)"


def test_one_incident_that_wants_too_much_trips_nothing() -> None:
    found = admit_drains(
        [proposal("n2", 7), proposal("n3", 7)], [], fleet(), DrainSettings(per_hour=9, per_incident=1), NOW
    )
    assert [refusal.cause for refusal in found.refused] == ["per_incident"]
    assert found.trips == ()


def test_too_many_drained_at_once_trips() -> None:
    old = [past(f"n{number}", number, NOW - 86400) for number in range(4)]
    found = admit(old, "n9", slurm=fleet(drained=("n0", "n1", "n2", "n3")))
    assert [trip.budget for trip in found.trips] == ["max_fraction"]


def test_while_something_is_tripped_nothing_is_granted_and_nothing_trips_again() -> None:
    found = admit([], "n2", stopped="drain.per_hour is tripped")
    assert (found.granted, found.trips) == ((), ())
    assert [(refusal.cause, refusal.reason) for refusal in found.refused] == [("stopped", "drain.per_hour is tripped")]


def test_a_node_that_somebody_holds_is_said_to_be_held_even_then() -> None:
    found = admit([], "n2", slurm=fleet(drained=("n2",)), stopped="paused")
    assert [refusal.cause for refusal in found.refused] == ["held-by-others"]


def test_what_a_person_drained_does_not_count_for_the_hour() -> None:
    by_hand = [past(f"n{number}", number, NOW - 5, check="manual") for number in range(5, 9)]
    assert admit(by_hand, "n2").granted


def test_the_hour_begins_anew_when_a_person_resets_it() -> None:
    history = [past("n1", 1, NOW - 60), past("n2", 2, NOW - 50)]
    reset = Switch(name="drain-budget:per_hour", changed_at=NOW - 40, who="ann")
    assert admit(history, "n3").trips
    assert admit(history, "n3", since=counted_since({reset.name: reset})).granted
    assert counted_since({}) == counted_since({reset.name: tripped("per_hour", "x", NOW)}) == 0.0
