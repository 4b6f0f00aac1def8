"""The judge of `make chaos` is judged here: it must be able to say no."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "chaos"), str(TESTS / "cluster")]

import report  # noqa: E402
from oracle import KINDS, Injection, causes, drain_is_right, verdict_is_right, was_there  # noqa: E402
from ring import losses  # noqa: E402
from transom_slurm.sandbox.faults import KINDS as FAULTS  # noqa: E402


def one(kind: str, node: str = "n2", job: int = 1, at: float = 100.0, healed: float | None = None) -> Injection:
    return Injection(number=1, kind=kind, node=node, job=job, at=at, healed_at=healed)


def incident(told: str, *nodes: str, job: int = 1, at: float = 105.0) -> dict[str, Any]:
    failure_class, _, blame = told.partition("/")
    about = {"class": failure_class, "blame": blame, "detected_by": "exit", "summary": ""}
    return {**about, "nodes": list(nodes), "job_id": job, "detected_at": at}


def test_every_kind_of_the_sandbox_is_injected() -> None:
    assert {kind.name.partition(":")[0] for kind in KINDS} == set(FAULTS)


def test_the_right_verdict_names_the_right_node() -> None:
    power = [one("power")]
    assert verdict_is_right(incident("host/node", "n2"), power)
    assert not verdict_is_right(incident("host/node", "n3"), power)
    assert not verdict_is_right(incident("gpu-hardware/node", "n2"), power)
    assert not verdict_is_right(incident("host/node", "n2"), [one("rank-kill")])


def test_a_failure_needs_a_cause() -> None:
    assert causes(incident("unknown/unknown"), [one("rank-kill")])
    assert not causes(incident("unknown/unknown"), [one("slow:40")]), "a slow node must fail no launch"
    assert not causes(incident("unknown/unknown", job=2), [one("rank-kill")])
    assert not causes(incident("unknown/unknown", at=90.0), [one("rank-kill")]), "nothing comes before its cause"
    assert not causes(incident("unknown/unknown", at=500.0), [one("rank-kill", healed=110.0)])


def test_only_a_node_that_is_ill_may_be_drained() -> None:
    ill = [one("power", healed=200.0)]
    assert drain_is_right("n2", 150.0, ill)
    assert not drain_is_right("n3", 150.0, ill)
    assert not drain_is_right("n2", 300.0, ill)
    assert not drain_is_right("n2", 150.0, [one("rank-stop")])


def test_only_a_job_that_was_there_can_notice() -> None:
    launches = [
        {"nodes": ["n1", "n2"], "started_at": 50.0, "ended_at": 101.0},
        {"nodes": ["n3", "n4"], "started_at": 102.0, "ended_at": None},
    ]
    assert not was_there(one("power"), launches), "it had left n2 for another reason"
    assert was_there(one("power", at=80.0), launches)
    assert was_there(one("power", "n4"), launches)
    assert not was_there(one("power", "n4", healed=104.0), launches)


def test_losses_depend_on_every_rank() -> None:
    assert losses(3, 20) == losses(3, 20)
    assert losses(3, 20) != losses(2, 20)
    assert len(set(losses(3, 50).values())) == 50


def test_the_report_counts_violations() -> None:
    chaos = SimpleNamespace(
        seed=1,
        injections=[one("power"), one("slow:40")],
        violations=["fleet: n3 was drained although it was well: x", "job 1: is lost: failed: y"],
        ended={1: 5},
        running={},
        drained=1,
        committed=2,
        values=3,
    )
    numbers = report.totals(chaos)
    assert (numbers["wrong drains"], numbers["lost jobs"], numbers["injected"]) == (1, 1, 2)
    assert "| power | 1 | 0 |" in report.markdown(chaos, 60.0)
