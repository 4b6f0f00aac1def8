"""What Slurm's reasons for waiting mean, and which of them no waiting ends."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transom_slurm.parsers import parse_squeue
from transom_slurm.pending import LAUNCH_FAILED, REASONS, Pending, explained, told, waits_for_person
from transom_slurm.states import parse_job_status
from transom_slurm.types import JobBase, SlurmJob

ROOT = Path(__file__).parents[2]
TOKEN = "~0123456789abcdef~"
"""The token with which the golden answers were asked for."""


def job(reason: str, state: str = "PENDING", partition: str = "main") -> SlurmJob:
    status = parse_job_status(state)
    return SlurmJob(job_id=7, name="x", user="a", status=status, state_text=state, reason=reason, partition=partition)


NEVER = [
    ("PartitionNodeLimit", "nodes", "scontrol show partition main"),
    ("PartitionTimeLimit", "time limit", "scontrol show partition main"),
    ("PartitionConfig", "does not give", "scontrol show partition main"),
    ("BadConstraints", "features", "sinfo -N -o '%N %f %G %m'"),
    ("QOSMaxNodePerJobLimit", "it alone", "sacctmgr show qos"),
    ("QOSMaxWallDurationPerJobLimit", "it alone", "sacctmgr show qos"),
    ("QOSMaxGRESPerNode", "it alone", "sacctmgr show qos"),
    ("QOSMinGRES", "less", "sacctmgr show qos"),
    ("AssocMaxCpuPerJobLimit", "it alone", "sacctmgr show assoc user=$USER"),
    ("AssocMaxWallDurationPerJobLimit", "it alone", "sacctmgr show assoc user=$USER"),
    ("ReservationDeleted", "gone", "scontrol show reservation"),
]
MAY_END = [
    ("InvalidAccount", "looks again", "sacctmgr show assoc user=$USER"),
    ("AccountNotAllowed", "looks again", "sacctmgr show assoc user=$USER"),
    ("InvalidQOS", "looks again", "sacctmgr show qos"),
    ("AssocMaxJobsLimit", "in use", "squeue --me"),
    ("QOSMaxJobsPerUserLimit", "in use", "squeue --me"),
    ("QOSMaxNodePerUserLimit", "in use", "squeue --me"),
    ("AssocGrpNodeLimit", "in use", ""),
    ("QOSGrpGRES", "in use", ""),
    ("AssociationResourceLimit", "in use", ""),
    ("MaxGRESPerAccount", "in use", ""),
    ("AssocGrpCPURunMinutesLimit", "still has too much time", "squeue -t R"),
    ("AssocGrpGRESMinutes", "used up", "sacctmgr show assoc user=$USER"),
    ("QOSGrpWallLimit", "used up", "sacctmgr show assoc user=$USER"),
    ("PartitionDown", "administrator", "scontrol show partition main"),
    ("ReqNodeNotAvail, UnavailableNodes:n[2-3]", "drained", "sinfo -R"),
    ("ReqNodeNotAvail, May be reserved for other job", "drained", "sinfo -R"),
    ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "down", "sinfo -R"),
    ("Reservation", "not begun", "scontrol show reservation"),
    ("Licenses", "licences", "scontrol show licenses"),
    ("Dependency", "depends", "scontrol show job 7"),
    ("BeginTime", "put off", ""),
    ("Priority", "first", ""),
    ("Resources", "free", ""),
]


@pytest.mark.parametrize(("reason", "meaning", "command"), NEVER)
def test_what_no_waiting_ends(reason: str, meaning: str, command: str) -> None:
    found = waits_for_person(job(reason))
    assert found is not None
    assert (found.command, found.hold) == (command, False)
    assert meaning in found.meaning
    assert waits_for_person(job(reason, "RUNNING")) is None


@pytest.mark.parametrize(("reason", "meaning", "command"), MAY_END)
def test_what_waiting_may_end_is_explained(reason: str, meaning: str, command: str) -> None:
    assert waits_for_person(job(reason)) is None
    found = explained(job(reason))
    assert found is not None
    assert found.command == command
    assert meaning in found.meaning
    assert told(job(reason)) == f"{reason} ({found.meaning}{'; see ' + command if command else ''})"


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("JobHeldUser", "scontrol release 7"),
        ("JobHeldAdmin", "scontrol release 7, by an administrator"),
        ("JobHoldMaxRequeue", "scontrol release 7"),
        ("launch failed requeued held", "scontrol release 7 && scontrol update jobid=7 StartTime=now"),
        ("user_env_retrieval_failed_requeued_held", "scontrol release 7 && scontrol update jobid=7 StartTime=now"),
        ("DependencyNeverSatisfied", "scontrol update jobid=7 Dependency="),
    ],
)
def test_a_hold_is_let_go_by_its_command(reason: str, command: str) -> None:
    found = waits_for_person(job(reason))
    assert found is not None
    assert (found.command, found.hold) == (command, True)


def test_a_reason_that_is_not_known_is_said_as_it_is() -> None:
    assert told(job("SomethingNew")) == "SomethingNew"
    assert told(job("")) == "no reason given"


def test_of_several_partitions_another_may_start_the_job() -> None:
    """Slurm tells the reason of the one that it tried last."""
    limit = job("PartitionTimeLimit", partition="gpu,cpu")
    found = explained(limit)
    assert found is not None
    assert found.command == "scontrol show partition gpu"
    assert waits_for_person(limit) is None
    assert waits_for_person(replace(job("PartitionTimeLimit"), qos="day,night")) is None
    assert waits_for_person(job("JobHeldUser", partition="gpu,cpu")) is not None


@pytest.mark.parametrize("row", REASONS, ids=lambda row: row.words[0])
def test_no_reason_is_hidden_behind_an_earlier_one(row: Pending) -> None:
    for word in row.words:
        found = explained(job(word.replace("*", "X")))
        assert found is not None
        assert found.meaning == row.meaning


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_every_reason_that_a_controller_has_given_is_known(version: str) -> None:
    answer = (ROOT / "tests/golden/slurm" / version / "squeue.txt").read_text()
    waiting = [one for one in parse_squeue(answer, TOKEN).values() if one.status.base is JobBase.PENDING]
    assert len(waiting) >= 5
    assert [one.reason for one in waiting if explained(one) is None] == []


def test_every_reason_that_a_page_names_is_known() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = set(
        re.findall(r"\b(?:Job(?:Held|Hold)|QOS|Assoc|Partition|ReqNode|BadCons|Invalid|Depend)[A-Z*][\w*]+", text)
    )
    named |= set(re.findall(LAUNCH_FAILED.replace(" ", "[ _]"), text))
    assert len(named) > 20
    assert sorted(word for word in named if explained(job(word.replace("*", "X"))) is None) == []
