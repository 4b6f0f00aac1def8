"""Raw facts become evidence: exits, heartbeats, stalls, what Slurm and the probe say."""

from __future__ import annotations

import pytest
from transom_slurm.types import JobBase, JobStatus, NodeStatus, SlurmJob, SlurmNode

from transomd.health.types import CheckResult, NodeReport
from transomd.tee import detect, srun
from transomd.tee.progress import Stall
from transomd.words import Action, Blame, FailureClass, Outcome, Role

AT = 1000.0


@pytest.mark.parametrize(
    ("code", "signature", "text", "role"),
    [
        (1, "EXIT", "rank 3 on n2 ended with code 1", Role.CONTEXT),
        (127, "EXIT", "rank 3 on n2 ended with code 127", Role.CONTEXT),
        (137, "EXIT-SIGKILL", "rank 3 on n2 ended with signal 9 (SIGKILL)", Role.CONTEXT),
        (-9, "EXIT-SIGKILL", "rank 3 on n2 ended with signal 9 (SIGKILL)", Role.CONTEXT),
        (139, "EXIT-SIGNAL", "rank 3 on n2 ended with signal 11 (SIGSEGV)", Role.CONTEXT),
        (143, "EXIT-SIGNAL", "rank 3 on n2 ended with signal 15 (SIGTERM)", Role.VICTIM),
        (-2, "EXIT-SIGNAL", "rank 3 on n2 ended with signal 2 (SIGINT)", Role.VICTIM),
        (255, "EXIT", "rank 3 on n2 ended with code 255", Role.CONTEXT),
    ],
)
def test_what_an_exit_code_says(code: int, signature: str, text: str, role: Role) -> None:
    found = detect.rank_exit(3, "n2", code, AT)
    assert found is not None
    assert (found.signature, found.text, found.role, found.rank, found.node) == (signature, text, role, 3, "n2")


def test_zero_is_no_evidence_and_a_rank_that_we_ended_is_a_victim() -> None:
    assert detect.rank_exit(3, "n2", 0, AT) is None
    ended = detect.rank_exit(3, "n2", 137, AT, told=True)
    assert ended is not None
    assert ended.role is Role.VICTIM


def test_srun_tells_how_each_task_ended_and_the_rest_is_teardown() -> None:
    found = srun.exits(
        "srun: error: n2: tasks 4-5,7: Exited with exit code 1\nsrun: error: n1: tasks 0-1: Killed\n"
        "srun: error: n3: task 9: Segmentation fault (core dumped)\nnoise\n",
        AT,
    )
    assert [(one.node, one.rank, one.signature, one.role) for one in found] == [
        ("n2", 4, "EXIT", Role.CONTEXT),
        ("n2", 5, "EXIT", Role.CONTEXT),
        ("n2", 7, "EXIT", Role.CONTEXT),
        ("n1", 0, "EXIT-SIGKILL", Role.VICTIM),
        ("n1", 1, "EXIT-SIGKILL", Role.VICTIM),
        ("n3", 9, "EXIT-SIGNAL", Role.CONTEXT),
    ]


def test_the_first_task_that_was_killed_is_no_victim() -> None:
    found = srun.exits("srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed\n", AT)
    assert [one.role for one in found] == [Role.CONTEXT, Role.VICTIM]


def test_a_hostile_range_of_tasks_is_bounded() -> None:
    assert len(srun.exits("srun: error: n1: tasks 0-999999999,5-9: Killed", AT)) <= 16_384


def test_a_lost_heartbeat_excludes_but_cannot_drain() -> None:
    found = detect.heartbeat_lost("n2", AT)
    assert (found.at, found.node, found.blame, found.action) == (AT, "n2", Blame.NODE, Action.EXCLUDE)
    assert found.forgeable


def test_the_silence_of_others_is_told_by_node() -> None:
    assert detect.silent({"n3": AT, "n2": AT + 1}, "n1") == [
        detect.heartbeat_lost("n2", AT + 1),
        detect.heartbeat_lost("n3", AT),
    ]


@pytest.mark.parametrize(
    ("state", "signature"),
    [("T", "PROCESS-STOPPED"), ("t", "PROCESS-TRACED"), ("D", "PROCESS-UNINTERRUPTIBLE")],
)
def test_a_stall_names_the_process_that_cannot_go_on(state: str, signature: str) -> None:
    found = detect.no_progress(Stall(61, 60, 12), AT, [detect.ProcessState(3, "n2", 4711, state)])
    assert [(one.signature, one.rank, one.node) for one in found] == [(signature, 3, "n2"), ("NO-PROGRESS", None, "")]
    assert found[1].text == "no progress for 61 s after step 12, where 60 s were allowed"


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_stall_blames_no_process_that_could_go_on(state: str) -> None:
    found = detect.no_progress(Stall(61, 60), AT, [detect.ProcessState(3, "n2", 4711, state)])
    assert [one.signature for one in found] == ["NO-PROGRESS"]
    assert found[0].blame is Blame.UNKNOWN


def node(name: str = "n2", base: str = "DOWN", flags: frozenset[str] = frozenset(), reason: str = "") -> SlurmNode:
    return SlurmNode(name, NodeStatus(base, flags), base, reason=reason, reason_time=900.0)


def test_a_node_that_slurm_calls_down_may_be_drained() -> None:
    found = detect.slurm_node(node(flags=frozenset({"NOT_RESPONDING"}), reason="Not responding"), AT)
    assert found is not None
    assert (found.signature, found.text, found.at) == ("SLURM-NODE-DOWN", "DOWN (Not responding)", 900.0)
    assert (found.action, found.forgeable) == (Action.DRAIN, False)


def test_a_node_that_does_not_respond_yet_is_not_down() -> None:
    found = detect.slurm_node(node(base="MIXED", flags=frozenset({"NOT_RESPONDING"})), AT)
    assert found is not None
    assert found.text == "NOT_RESPONDING"


@pytest.mark.parametrize("flag", ["REBOOT_ISSUED", "POWERED_DOWN", "MAINTENANCE"])
def test_a_node_that_is_planned_to_be_away_is_never_drained(flag: str) -> None:
    found = detect.slurm_node(node(flags=frozenset({flag})), AT)
    assert found is not None
    assert found.action is Action.EXCLUDE


def test_slurm_has_nothing_against_a_good_node_or_one_that_a_person_drained() -> None:
    assert detect.slurm_node(node(base="MIXED"), AT) is None
    assert detect.slurm_node(node(base="IDLE", flags=frozenset({"DRAIN"}), reason="fan broken"), AT) is None


def job(base: JobBase, reason: str = "") -> SlurmJob:
    return SlurmJob(7, "j", "u", JobStatus(base), base.value, reason=reason, end_time=950.0, nodes=("n1", "n2"))


@pytest.mark.parametrize(
    ("base", "failure_class", "blame", "action"),
    [
        (JobBase.TIMEOUT, FailureClass.TIME_LIMIT, Blame.EXTERNAL, Action.RESTART),
        (JobBase.DEADLINE, FailureClass.TIME_LIMIT, Blame.EXTERNAL, Action.STOP),
        (JobBase.PREEMPTED, FailureClass.PREEMPTION, Blame.EXTERNAL, Action.RESTART),
        (JobBase.CANCELLED, FailureClass.CANCELLED, Blame.EXTERNAL, Action.NONE),
        (JobBase.OUT_OF_MEMORY, FailureClass.HOST_MEMORY, Blame.PROGRAM, Action.STOP),
        (JobBase.NODE_FAIL, FailureClass.HOST, Blame.UNKNOWN, Action.RESTART),
        (JobBase.BOOT_FAIL, FailureClass.HOST, Blame.UNKNOWN, Action.RESTART),
    ],
)
def test_how_slurm_ended_a_job(base: JobBase, failure_class: FailureClass, blame: Blame, action: Action) -> None:
    (found,) = detect.slurm_job(job(base), [], AT)
    assert (found.failure_class, found.blame, found.action, found.at) == (failure_class, blame, action, 950.0)
    assert not found.forgeable


@pytest.mark.parametrize("base", [JobBase.COMPLETED, JobBase.FAILED, JobBase.RUNNING, JobBase.UNKNOWN])
def test_other_states_of_a_job_say_nothing_by_themselves(base: JobBase) -> None:
    assert detect.slurm_job(job(base), [], AT) == []


def test_a_job_that_we_cancelled_was_cancelled_by_no_person() -> None:
    assert detect.slurm_job(job(JobBase.CANCELLED), [], AT, ours=True) == []


def test_a_job_cancelled_by_a_failed_prolog_was_cancelled_by_no_person() -> None:
    sick = node(base="IDLE", flags=frozenset({"DRAIN"}), reason="Prolog error")
    (found,) = detect.slurm_job(job(JobBase.CANCELLED), [sick], AT)
    assert (found.signature, found.node, found.blame) == ("SLURM-PROLOG", "n2", Blame.NODE)
    elsewhere = node(name="n9", base="IDLE", flags=frozenset({"DRAIN"}), reason="Prolog error")
    assert [one.signature for one in detect.slurm_job(job(JobBase.CANCELLED), [elsewhere], AT)] == [
        "SLURM-PROLOG",
        "SLURM-CANCELLED",
    ]


def report(check: str, signature: str = "", outcome: Outcome = Outcome.UNFIT) -> NodeReport:
    result = CheckResult(check=check, outcome=outcome, value="7", limit="8", evidence="7 of 8", signature=signature)
    return NodeReport(node="n2", at=AT, reached=True, results=(result,))


@pytest.mark.parametrize(
    ("check", "signature", "failure_class"),
    [
        ("gpu_count", "", FailureClass.GPU_HARDWARE),
        ("gpu_ecc", "", FailureClass.GPU_MEMORY),
        ("xid", "XID-79", FailureClass.GPU_HARDWARE),
        ("xid", "XID-95", FailureClass.GPU_MEMORY),
        ("xid", "XID-74", FailureClass.NVLINK),
        ("disk", "", FailureClass.STORAGE),
        ("ib_port", "", FailureClass.NETWORK),
        ("clock", "", FailureClass.HOST),
    ],
)
def test_what_the_probe_finds_unfit_may_be_drained(check: str, signature: str, failure_class: FailureClass) -> None:
    (found,) = detect.probe(report(check, signature))
    assert (found.failure_class, found.blame, found.action) == (failure_class, Blame.NODE, Action.DRAIN)
    assert (found.node, found.text, found.forgeable) == ("n2", f"{check}: 7 of 8", False)


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.FIT])
def test_what_is_not_unfit_is_no_evidence(outcome: Outcome) -> None:
    assert detect.probe(report("disk", outcome=outcome)) == []


def test_a_node_that_the_probe_cannot_reach_is_unknown_not_bad() -> None:
    (found,) = detect.probe(NodeReport(node="n2", at=AT, reached=False, error="connect: timed out"))
    assert (found.role, found.blame, found.action) == (Role.CONTEXT, Blame.UNKNOWN, Action.NONE)
    assert found.text == "the probe could not reach n2: connect: timed out"
