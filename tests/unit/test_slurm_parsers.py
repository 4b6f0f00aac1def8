"""The parsers read what real controllers printed (tests/golden/slurm/<version>), hostile names included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transom_slurm.errors import SlurmUnavailable, SlurmUnreadable
from transom_slurm.parsers import (
    JOB_FIELDS,
    new_token,
    parse_config,
    parse_duration,
    parse_exit,
    parse_nodes,
    parse_reservations,
    parse_sacct,
    parse_squeue,
    parse_steps,
    parse_topology,
    squeue_format,
)
from transom_slurm.states import DrainRecord, drain_is_own, drain_refusal
from transom_slurm.types import ExitStatus, JobBase, SlurmStep

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
TOKEN = "~0123456789abcdef~"
VERSIONS = ("22.05.8", "24.11.5")
EVIL = 'evil|name\nwith newline ~ %j "q" JobId=99'
versions = pytest.mark.parametrize("version", VERSIONS)


def _read(version: str, name: str) -> str:
    return (GOLDEN / version / name).read_text()


@versions
def test_running_job(version: str) -> None:
    job = parse_squeue(_read(version, "squeue.txt"), TOKEN)[5]
    assert (job.name, job.comment, job.user, job.state_text) == ("transom-7-2", "transom:7:2", "nobody", "RUNNING")
    assert (job.partition, job.account, job.qos, job.work_dir) == ("main", "acc", "normal", "/tmp")
    assert (job.nodes, job.batch_host, job.time_limit_s) == (("n1", "n2"), "n1", 93840)
    assert job.submit_time
    assert job.start_time
    assert job.submit_time <= job.start_time
    assert job.end_time is job.exit is job.derived_exit is None, "a forecast is no fact"
    assert job.ends_by == job.start_time + 93840
    assert not job.may_requeue
    assert not job.ended


@versions
def test_a_job_that_slurm_will_end_before_its_time_limit_is_given_notice(version: str) -> None:
    """As when it is preempted with a GraceTime; of those with a limit, or with none, that run until then, none is."""
    jobs = parse_squeue(_read(version, "squeue.txt"), TOKEN)
    assert {job.status.base for job in jobs.values() if job.ends_by} == {JobBase.RUNNING}
    assert not any(job.is_given_notice for job in jobs.values())
    assert jobs[5].start_time
    soon = replace(jobs[5], ends_by=jobs[5].start_time + 900)
    assert soon.is_given_notice
    assert replace(soon, time_limit_s=None).is_given_notice
    assert not replace(soon, time_limit_s=900).is_given_notice


@versions
def test_every_job_is_listed_once_whatever_its_name(version: str) -> None:
    jobs = parse_squeue(_read(version, "squeue.txt"), TOKEN)
    assert sorted(jobs) == list(range(1, 12))
    assert jobs[1].name == EVIL
    assert jobs[1].comment == "com|ment\ttab, a=b"
    assert jobs[11].name == ""


@versions
@pytest.mark.parametrize(
    ("job_id", "base", "status", "derived"),
    [
        (1, "FAILED", ExitStatus(3), ExitStatus(0)),
        (2, "FAILED", ExitStatus(0, 9), ExitStatus(0)),
        (3, "CANCELLED", ExitStatus(0, 15), ExitStatus(0)),
        (4, "COMPLETED", ExitStatus(0), ExitStatus(7)),
    ],
)
def test_ends(version: str, job_id: int, base: str, status: ExitStatus, derived: ExitStatus) -> None:
    job = parse_squeue(_read(version, "squeue.txt"), TOKEN)[job_id]
    assert (job.status.base.value, job.exit, job.derived_exit) == (base, status, derived)
    assert job.ended
    assert job.end_time


@versions
def test_waiting_jobs_say_why(version: str) -> None:
    jobs = parse_squeue(_read(version, "squeue.txt"), TOKEN)
    assert jobs[6].reason.startswith("Nodes required for job are DOWN, DRAINED")
    assert (jobs[8].reason, jobs[8].priority) == ("JobHeldUser", 0)
    assert (jobs[10].reason, jobs[11].reason) == ("Dependency", "BeginTime")
    for job_id in (6, 8, 9, 10, 11):
        job = jobs[job_id]
        assert job.status.base is JobBase.PENDING
        assert job.start_time is job.end_time is job.exit is None
        assert job.nodes == ()
        assert job.batch_host == ""


@versions
def test_steps(version: str) -> None:
    steps = parse_steps(_read(version, "squeue_steps.txt"), TOKEN)
    assert SlurmStep("5.0", "step|name", "RUNNING", ("n1", "n2")) in steps
    assert SlurmStep("5.batch", "batch", "RUNNING", ("n1",)) in steps


@versions
def test_nodes(version: str) -> None:
    nodes = parse_nodes(_read(version, "nodes.txt"))
    assert list(nodes) == ["n1", "n2", "n3", "n4"]
    n1 = nodes["n1"]
    assert (n1.state_text, n1.partitions, n1.gres, n1.cpus) == ("ALLOCATED", ("main", "debug"), "gpu:8", 8)
    assert (n1.reason, n1.reason_user, n1.reason_time, n1.comment) == ("", "", None, "")
    assert n1.address.startswith("127.")
    assert n1.boot_time
    assert n1.boot_time > 1_700_000_000


@versions
def test_a_reason_that_looks_like_fields_stays_a_reason(version: str) -> None:
    node = parse_nodes(_read(version, "nodes.txt"))["n4"]
    assert node.state_text == "IDLE+DRAIN"
    assert node.reason == "transom[xid] Xid 79 State=IDLE  Comment=x [root@2020] hm"
    assert node.comment == "hello Reason=foo [bob@12]"
    assert node.reason_time
    assert drain_is_own(node, DrainRecord(node.reason, "root", node.reason_time))


@versions
def test_a_persons_words_keep_a_node_from_being_drained(version: str) -> None:
    node = parse_nodes(_read(version, "nodes.txt"))["n3"]
    assert (node.status.base, node.reason, node.reason_user) == ("DOWN", "disk swap, ask Bob", "root")
    assert drain_refusal(node)


@versions
def test_a_reason_of_two_lines_belongs_to_nobody(version: str) -> None:
    node = parse_nodes(_read(version, "nodes.txt"))["n2"]
    assert node.reason.startswith("two [root@")
    assert node.reason.endswith("lines")
    assert node.reason_time is None


@versions
def test_accounting(version: str) -> None:
    jobs = parse_sacct(_read(version, "sacct.txt"), TOKEN)
    assert sorted(jobs) == [1, 2, 3, 4, 5, 6]
    assert (jobs[1].exit, jobs[2].exit) == (ExitStatus(3), ExitStatus(0, 9))
    assert (jobs[3].state_text, jobs[3].status.base) == ("CANCELLED by 0", JobBase.CANCELLED)
    assert jobs[3].ended
    assert jobs[5].exit is jobs[5].end_time is None
    assert (jobs[5].time_limit_s, jobs[5].nodes, jobs[6].nodes) == (93840, ("n1", "n2"), ())
    assert jobs[1].comment == "com|ment\ttab, a=b"


@versions
def test_config_topology_reservations(version: str) -> None:
    config = parse_config(_read(version, "config.txt"))
    assert config["SLURM_VERSION"] == version
    assert config["SlurmdTimeout"] == "5 sec"
    assert parse_topology(_read(version, "topology.txt")) == {"leaf1": ("n1", "n2"), "leaf2": ("n3", "n4")}
    now, later = parse_reservations(_read(version, "reservations.txt"))
    assert (now.name, now.nodes, later.nodes) == ("mnt", ("n3",), ("n1", "n2"))
    assert {"MAINT", "IGNORE_JOBS"} <= now.flags
    assert now.start
    assert now.end == now.start + 3600


def test_nothing_listed_is_an_answer() -> None:
    assert parse_squeue("", TOKEN) == parse_nodes("") == parse_sacct("\n", TOKEN) == {}
    assert parse_topology("No topology information available\n") == {}
    assert parse_reservations("No reservations in the system\n") == []


def test_a_cut_off_answer_is_unreadable_and_so_unknown() -> None:
    whole = _read("22.05.8", "squeue.txt")
    for cut in (len(whole) // 2, len(whole) - 5):
        with pytest.raises(SlurmUnreadable, match="cut off"):
            parse_squeue(whole[:cut], TOKEN)
    assert issubclass(SlurmUnreadable, SlurmUnavailable)


def test_a_doubled_or_mangled_answer_is_unreadable() -> None:
    jobs, nodes = _read("24.11.5", "squeue.txt"), _read("24.11.5", "nodes.txt")
    with pytest.raises(SlurmUnreadable, match="listed twice"):
        parse_squeue(jobs + jobs, TOKEN)
    with pytest.raises(SlurmUnreadable, match="listed twice"):
        parse_nodes(nodes + nodes)
    with pytest.raises(SlurmUnreadable, match="not a node"):
        parse_nodes("NodeName=n9 State=WHAT\n")
    with pytest.raises(SlurmUnreadable, match="SLURM_VERSION"):
        parse_config("slurm_load_ctl_conf error\n")
    with pytest.raises(SlurmUnreadable, match="not a reservation"):
        parse_reservations("ReservationName=x Nodes=n1\n")


def test_a_job_cannot_forge_another(monkeypatch: pytest.MonkeyPatch) -> None:
    record = [TOKEN.join(["7", "mallory", "RUNNING", *["0"] * (len(JOB_FIELDS) - 3)])]
    forged = "~00~".join(["1", "root", "COMPLETED"])
    text = record[0] + forged + TOKEN + "\n"
    fields = dict.fromkeys(JOB_FIELDS, "0")
    assert len(fields) == len(JOB_FIELDS)
    assert list(parse_squeue(text, TOKEN)) == [7]
    assert new_token() != new_token()


def test_fields_are_asked_for_in_full() -> None:
    assert squeue_format(("JobId", "Name"), "~a~") == "JobId:~a~,Name:~a~"
    assert not new_token()[0].isdigit(), "a digit would be read as a width"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("1:00:00", 3600), ("1-00:00:00", 86400), ("0:30", 30), ("UNLIMITED", None), ("N/A", None)],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("768", ExitStatus(3)), ("9", ExitStatus(0, 9)), ("36608", ExitStatus(143)), ("4021", ExitStatus(0, 53)),
        ("0", ExitStatus(0)), ("3:0", ExitStatus(3)), ("0:15", ExitStatus(0, 15)), ("4294967294", None), ("", None),
    ],
)  # fmt: skip
def test_exit_codes(text: str, status: ExitStatus | None) -> None:
    assert parse_exit(text) == status
