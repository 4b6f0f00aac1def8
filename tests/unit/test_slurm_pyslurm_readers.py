"""Which reader is used with which release of pyslurm, and what the readers make of what pyslurm changes or hides.

The attributes and keys are those of pyslurm's sources; 22.5.1, 22.5.3 and 24.11.0 were also run for real.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transom_slurm.pyslurm_client import _job, _node
from transom_slurm.pyslurm_worker import _dict_jobs, _dict_nodes, _jobs, _nodes, _steps, answer, readers

CLASSES = ("Jobs", "Nodes", "JobSteps")
RELEASES = {
    "22.5.1": ("job", "node", "jobstep", "reservation"),
    "22.5.3": (*CLASSES, "job", "node", "jobstep", "reservation"),
    "23.2.0": ("job", "node", "jobstep", "reservation"),
    "23.11.1": (*CLASSES, "job", "node", "jobstep", "reservation"),
    "24.11.0": (*CLASSES, "job", "node", "jobstep", "reservation"),
    "25.5.0": (*CLASSES, "job", "jobstep", "reservation", "Reservations"),
    "25.11.2": (*CLASSES, "Reservations"),
}


@pytest.mark.parametrize("version", RELEASES)
def test_the_classes_are_preferred_and_what_is_not_there_is_left_to_the_commands(version: str) -> None:
    names = RELEASES[version]
    known = readers(SimpleNamespace(**dict.fromkeys(names)))
    new = "Jobs" in names
    assert known["jobs"] is (_jobs if new else _dict_jobs)
    assert known["nodes"] is (_nodes if new else _dict_nodes)
    assert ("steps" in known) is new
    assert ("reservations" in known) is ("reservation" in names)


def _listing(*records: Any) -> Any:
    return SimpleNamespace(load=lambda: dict(enumerate(records)))


NODE = {
    "name": "n1",
    "state": "ALLOCATED+CLOUD",
    "allocated_cpus": 0,
    "effective_cpus": 16,
    "reason": None,
    "reason_user": None,
    "reason_time": None,
    "address": None,
    "partitions": ["a", "b"],
    "configured_gres": {"gpu:h100": 8, "shard": 4},
    "boot_time": 5,
    "total_cpus": 16,
    "comment": None,
}


def _read_node(**changes: Any) -> Any:
    rows, unread = _nodes(SimpleNamespace(Nodes=_listing(SimpleNamespace(**(NODE | changes)))))
    assert not unread
    return _node(*rows[0])


@pytest.mark.parametrize(
    ("state", "allocated", "usable", "seen"),
    [
        ("ALLOCATED", 4, 16, "MIXED"),
        ("ALLOCATED+DRAIN", 4, 16, "MIXED+DRAIN"),
        ("ALLOCATED", 16, 16, "ALLOCATED"),
        ("IDLE", 0, 16, "IDLE"),
        ("DOWN+NOT_RESPONDING", 0, None, "DOWN+NOT_RESPONDING"),
    ],
)
def test_mixed_before_23_11(state: str, allocated: int, usable: int | None, seen: str) -> None:
    node = _read_node(state=state, allocated_cpus=allocated, effective_cpus=usable)
    assert node.state_text == seen
    assert node.status.base == seen.partition("+")[0]


def test_a_node() -> None:
    node = _read_node()
    assert (node.gres, node.partitions, node.address) == ("gpu:h100:8,shard:4", ("a", "b"), "n1")
    assert (node.reason, node.reason_user, node.reason_time, node.comment) == ("", "", None, "")
    assert node.status.flags == {"CLOUD"}


def test_a_user_whom_nobody_knows() -> None:
    class Orphan(SimpleNamespace):
        @property
        def reason_user(self) -> str:
            raise KeyError("getpwuid(): uid not found: 4711")

    orphan = Orphan(**{key: value for key, value in NODE.items() if key != "reason_user"} | {"reason": "x"})
    rows, unread = _nodes(SimpleNamespace(Nodes=_listing(orphan)))
    assert not unread
    assert _node(*rows[0]).reason_user == "nobody"


def _old_node(state: str) -> tuple[list[Any], list[Any]]:
    node = {
        "name": "n1", "state": state, "reason": "r", "reason_uid": 0, "reason_time": 9, "node_addr": "a",
        "partitions": None, "gres": ["gpu:8"], "boot_time": 0, "cpus": 2,
    }  # fmt: skip
    return _dict_nodes(SimpleNamespace(node=lambda: SimpleNamespace(get=lambda: {"n1": node})))


@pytest.mark.parametrize(
    ("written", "base", "flags"),
    [
        ("IDLE*+DRAIN", "IDLE", {"NOT_RESPONDING", "DRAIN"}),
        ("IDLE+CLOUD+POWER", "IDLE", {"CLOUD", "POWERED_DOWN"}),
        ("IDLE+CLOUD+POWERING_DOWN", "IDLE", {"CLOUD", "POWERING_DOWN"}),
        ("MIXED", "MIXED", set()),
    ],
)
def test_node_states_of_the_old_api(written: str, base: str, flags: set[str]) -> None:
    rows, unread = _old_node(written)
    assert not unread
    node = _node(*rows[0])
    assert (node.status.base, node.status.flags, node.boot_time, node.gres) == (base, flags, None, "gpu:8")
    assert (node.reason_user, node.reason_time) == ("root", 9)


@pytest.mark.parametrize("written", ["MAINT", "PLANNED", "REBOOT@", "RESERVED", "FAILING*"])
def test_a_base_that_the_old_api_hides_is_not_guessed(written: str) -> None:
    assert _old_node(written) == ([], ["n1"])


def test_an_old_job_without_a_limit_and_one_with_a_hidden_name() -> None:
    job = {
        "name": "j", "user_id": 0, "job_state": "PENDING", "state_reason": "None", "comment": None, "partition": "p",
        "account": None, "qos": None, "submit_time": 5, "start_time": 9, "end_time": 0, "time_limit": "UNLIMITED",
        "nodes": None, "batch_host": None, "priority": 1, "restart_cnt": 0, "work_dir": "/w", "requeue": True,
    }  # fmt: skip
    pyslurm = SimpleNamespace(job=lambda: SimpleNamespace(get=lambda: {7: job, 8: job | {"name": "a\ufffd"}}))
    rows, unread = _dict_jobs(pyslurm)
    assert unread == [8]
    seen = _job(*rows[0])
    assert (seen.time_limit_s, seen.start_time, seen.end_time, seen.reason, seen.nodes) == (None, None, None, "", ())


def test_nodes_of_a_step_that_pyslurm_split_at_their_comma() -> None:
    def step(nodes: Any) -> Any:
        return SimpleNamespace(job_id=3, id="batch", name="batch", state="RUNNING", allocated_nodes=nodes)

    pyslurm = SimpleNamespace(
        JobSteps=SimpleNamespace(load_all=lambda: {3: {"x": step(["n[1", "3]"]), "y": step("n2")}})
    )
    assert [row[3] for row in _steps(pyslurm)[0]] == ["n[1,3]", "n2"]


def test_an_attribute_that_is_gone_is_pyslurms_fault_and_not_slurms() -> None:
    pyslurm = SimpleNamespace(Jobs=_listing(SimpleNamespace(id=1)))
    said = answer(pyslurm, readers(pyslurm), "jobs")
    assert said["slurm"] is False
    assert said["error"].startswith("AttributeError")
