"""Jobs that will not go on by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from transom_slurm.states import parse_job_status, parse_node_status
from transom_slurm.stuck import COMPLETING_S, stuck_jobs
from transom_slurm.types import SlurmJob, SlurmNode

NOW = 1_795_986_000.0


def job(state: str, reason: str = "None", **more: Any) -> SlurmJob:
    told = {"job_id": 7, "name": "train", "user": "alice", "partition": "main", **more}
    return SlurmJob(status=parse_job_status(state), state_text=state, reason=reason, **told)


def nodes(**states: str) -> dict[str, SlurmNode]:
    """Nodes by state, for example ``n1="idle"`` or ``n2="IDLE+DRAIN|Prolog error"``."""
    found = {}
    for name, told in states.items():
        state, _, reason = told.partition("|")
        found[name] = SlurmNode(
            name=name, status=parse_node_status(state), state_text=state, reason=reason, partitions=("main",)
        )
    return found


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
def test_a_job_held_for_a_failed_launch(reason: str) -> None:
    (found,) = stuck_jobs([job("PENDING", reason, priority=0)], nodes(n1="IDLE", n2="IDLE+DRAIN|Prolog error"), now=NOW)
    assert found.command == "scontrol release 7 && scontrol update jobid=7 StartTime=now   # or: scancel 7"
    assert "n2" in found.cause
    assert "n1" not in found.cause


def test_a_rewritten_prolog_error_is_named_too() -> None:
    known = nodes(n3="IDLE+DRAIN|transom[gpu-count] Prolog error job=7: 7 of 8 GPUs")
    (found,) = stuck_jobs([job("PENDING", "launch failed requeued held")], known, now=NOW)
    assert found.cause.endswith("n3")


def test_a_job_held_for_an_environment_that_could_not_be_read() -> None:
    waiting = job("PENDING", "user env retrieval failed requeued held", priority=0)
    (found,) = stuck_jobs([waiting], nodes(n1="IDLE"), now=NOW)
    assert found.command.startswith("scontrol release 7 && ")
    assert "environment of its user" in found.cause


def test_other_held_jobs() -> None:
    held = [
        job("PENDING", "JobHoldMaxRequeue", job_id=1, restarts=5),
        job("SPECIAL_EXIT", "JobHeldUser", job_id=2),
        job("PENDING", "DependencyNeverSatisfied", job_id=3),
        job("PENDING", "BeginTime", job_id=4, restarts=1, start_time=NOW + 90),
    ]
    found = stuck_jobs(reversed(held), nodes(n1="IDLE"), now=NOW)
    assert [one.job.job_id for one in found] == [1, 2, 3, 4]
    assert [one.command.split("   ")[0] for one in found] == [
        "scontrol release 1",
        "scontrol release 2",
        "scontrol update jobid=3 Dependency=",
        "scontrol update jobid=4 StartTime=now",
    ]
    assert "90 s" in found[3].cause


@pytest.mark.parametrize("reason", ["PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"])
def test_a_job_that_no_partition_of_this_form_ever_starts(reason: str) -> None:
    (found,) = stuck_jobs([job("PENDING", reason, job_id=5)], nodes(n1="IDLE", n2="ALLOCATED"), now=NOW)
    assert found.command == "scontrol show partition main   # then: scancel 5"
    assert "its partition" in found.cause
    assert found.cause.endswith(f"({reason})")


@pytest.mark.parametrize("reason", ["BadConstraints", "QOSMinGRES", "QOSMaxNodePerJobLimit"])
def test_a_job_that_no_limit_of_its_own_lets_start(reason: str) -> None:
    (found,) = stuck_jobs([job("PENDING", reason, job_id=5)], nodes(n1="IDLE"), now=NOW)
    assert found.command.endswith("# then: scancel 5")
    assert reason in found.cause


@pytest.mark.parametrize(
    "waiting",
    [
        job("PENDING", "BeginTime", start_time=NOW + 3600),
        job("PENDING", "JobHeldUser"),
        job("PENDING", "Priority"),
        job("PENDING", "AssocMaxJobsLimit"),
        job("PENDING", "Dependency"),
        job("RUNNING"),
        job("COMPLETED"),
        job("COMPLETING", end_time=NOW - 5, nodes=("n1",)),
    ],
    ids=lambda one: f"{one.state_text}-{one.reason}",
)
def test_what_waits_its_turn_is_not_stuck(waiting: SlurmJob) -> None:
    assert stuck_jobs([waiting], nodes(n1="IDLE+DRAIN|fan", n2="IDLE"), now=NOW) == []


def test_resources_that_never_come() -> None:
    waiting = [job("PENDING", "Resources")]
    (found,) = stuck_jobs(waiting, nodes(n1="IDLE", n2="IDLE+DRAIN|fan", n3="DOWN|Not responding"), now=NOW)
    assert found.command == "scontrol show node n[2-3]"
    assert "n2 (fan)" in found.cause
    assert stuck_jobs(waiting, nodes(n1="ALLOCATED", n2="IDLE+DRAIN|fan"), now=NOW) == []
    assert stuck_jobs(waiting, nodes(n1="IDLE", n2="IDLE"), now=NOW) == []


@pytest.mark.parametrize(
    "reason",
    [
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        "ReqNodeNotAvail, UnavailableNodes:n2",
        "NodeDown",
    ],
)
def test_nodes_that_are_away(reason: str) -> None:
    (found,) = stuck_jobs([job("PENDING", reason)], nodes(n1="ALLOCATED", n2="IDLE+DRAIN|fan"), now=NOW)
    assert found.command == "scontrol show node n2"
    elsewhere = nodes(n2="IDLE+DRAIN|fan")
    assert stuck_jobs([job("PENDING", reason, partition="other")], elsewhere, now=NOW) == []


def test_a_job_that_does_not_end() -> None:
    ending = job("COMPLETING", end_time=NOW - COMPLETING_S - 1, nodes=("n1", "n2"))
    (found,) = stuck_jobs([ending], nodes(n1="IDLE", n2="ALLOCATED+COMPLETING"), now=NOW)
    assert "on n2 do not end" in found.cause
    assert "nodename=n2 state=down" in found.command
    beside = job("RUNNING", job_id=8, nodes=("n2",))
    (found,) = stuck_jobs([ending, beside], nodes(n1="IDLE", n2="MIXED+COMPLETING"), now=NOW)
    assert found.command.startswith("ssh n2 ps"), "DOWN would end the other job"
