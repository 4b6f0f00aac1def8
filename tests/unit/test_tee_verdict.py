"""Fusion: the rules, what beats what, and that nobody is blamed without evidence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transom_slurm.types import JobBase, JobStatus, NodeStatus, SlurmJob, SlurmNode

from transomd.health.types import CheckResult, NodeReport
from transomd.tee import detect, srun
from transomd.tee.case import by_address
from transomd.tee.matcher import Matcher
from transomd.tee.progress import Stall
from transomd.tee.types import Chunk, Evidence, Verdict
from transomd.tee.verdict import fuse
from transomd.words import Action, Blame, Confidence, FailureClass, Outcome, Role

NODES = ("n1", "n2", "n3", "n4")
RANKS = {"n1": (0, 1), "n2": (2, 3), "n3": (4, 5), "n4": (6, 7)}
T = 1_780_000_000.0
PEER = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.9.0.2]:23451"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"


def judge(evidence: Sequence[Evidence], previous: Sequence[Verdict] = (), *, has_run: bool = False) -> Verdict:
    return fuse(evidence, nodes=NODES, ranks_by_node=RANKS, previous=previous, has_run=has_run)


def log(line: str, rank: int | None = None, at: float = T, node: str = "", file: str = "") -> list[Evidence]:
    matcher = Matcher(nodes=NODES)
    name = file or f"rank-{rank}.log"
    matcher.feed(Chunk(file=name, data=line.encode() + b"\n", rank=rank, node=node, fresh=True), at)
    matcher.finish()
    return matcher.evidence()


def raised(exception: str, rank: int | None, at: float = T) -> list[Evidence]:
    return log(f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{exception}', rank, at)


def kernel(node: str, text: str, at: float = T) -> list[Evidence]:
    return log(f"[1.0] {text}", at=at, node=node, file=f"dmesg-{node}")


def xid(node: str, code: int, at: float = T) -> list[Evidence]:
    return kernel(node, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name=python3, Fatal", at)


def down(node: str, at: float = T, flags: frozenset[str] = frozenset()) -> Evidence:
    slurm = SlurmNode(node, NodeStatus("DOWN", flags), "DOWN", reason="Not responding", reason_time=at)
    found = detect.slurm_node(slurm, at)
    assert found is not None
    return found


def unfit(node: str, check: str = "gpu_count", at: float = T) -> list[Evidence]:
    result = CheckResult(check=check, outcome=Outcome.UNFIT, evidence="7 of 8")
    return detect.probe(NodeReport(node=node, at=at, reached=True, results=(result,)))


def ended(base: JobBase, at: float = T) -> list[Evidence]:
    return detect.slurm_job(SlurmJob(7, "j", "u", JobStatus(base), base.value, end_time=at), [], at)


def exits(code: int, *ranks: int, at: float = T) -> list[Evidence]:
    node_of = {rank: node for node, its in RANKS.items() for rank in its}
    found = [detect.rank_exit(rank, node_of[rank], code, at) for rank in ranks]
    return [one for one in found if one]


def short(verdict: Verdict) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return (
        str(verdict.failure_class),
        str(verdict.blame),
        str(verdict.action),
        verdict.nodes,
        verdict.drainable,
    )


def test_no_evidence_is_unknown_and_blames_nobody() -> None:
    verdict = judge([])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert verdict.confidence is Confidence.LOW


def test_what_srun_says_is_told_where_nothing_else_was_said() -> None:
    verdict = judge(log("srun: error: --nodes is incompatible with --distribution=arbitrary"))
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert "srun: error: --nodes is incompatible with --distribution=arbitrary" in verdict.summary


def test_a_lost_heartbeat_alone_excludes_and_does_not_drain() -> None:
    verdict = judge([detect.heartbeat_lost("n2", T)])
    assert short(verdict) == ("host", "node", "exclude", ("n2",), ())
    assert "stopped answering" in verdict.summary


def test_slurms_word_makes_it_drainable_and_the_summary_says_both() -> None:
    verdict = judge([detect.heartbeat_lost("n2", T), down("n2", T + 30)])
    assert short(verdict) == ("host", "node", "drain", ("n2",), ("n2",))
    assert verdict.confidence is Confidence.HIGH
    assert verdict.summary.startswith("Node n2 stopped answering at ")
    assert "is DOWN (Not responding) to Slurm" in verdict.summary
    assert verdict.summary.endswith("The job can go on without it.")


def test_two_nodes_at_once_are_each_named_and_only_the_confirmed_one_is_drainable() -> None:
    verdict = judge([detect.heartbeat_lost("n2", T), detect.heartbeat_lost("n3", T + 1), down("n3", T + 30)])
    assert short(verdict) == ("host", "node", "drain", ("n2", "n3"), ("n3",))


def test_a_node_that_is_planned_to_be_away_is_left_out_and_not_drained() -> None:
    verdict = judge([down("n2", flags=frozenset({"REBOOT_ISSUED"}))])
    assert short(verdict) == ("host", "node", "exclude", ("n2",), ())


@pytest.mark.parametrize("count", [3, 4])
def test_more_than_half_of_the_nodes_at_once_is_the_network(count: int) -> None:
    gone = [found for node in NODES[:count] for found in (detect.heartbeat_lost(node, T), down(node, T + 30))]
    verdict = judge(gone)
    assert short(verdict) == ("network", "network", "wait", (), ())


def test_a_launcher_that_hears_not_even_its_own_node_blames_nobody() -> None:
    verdict = judge(detect.silent(dict.fromkeys(NODES, T), "n1"))
    assert short(verdict) == ("launcher", "unknown", "restart", (), ())
    assert "the launcher's own node" in verdict.summary


def test_slurms_word_for_one_of_them_still_counts() -> None:
    verdict = judge([*detect.silent({"n1": T, "n2": T}, "n1"), down("n2", T + 5)])
    assert short(verdict) == ("host", "node", "drain", ("n2",), ("n2",))


def test_half_of_the_nodes_are_two_nodes() -> None:
    verdict = judge([detect.heartbeat_lost("n1", T), detect.heartbeat_lost("n2", T)])
    assert verdict.nodes == ("n1", "n2")


def test_both_nodes_of_a_small_job_are_named() -> None:
    gone = [detect.heartbeat_lost("n1", T), detect.heartbeat_lost("n2", T)]
    assert fuse(gone, nodes=("n1", "n2"), ranks_by_node={}).blame is Blame.NODE


def test_an_unfit_probe_drains() -> None:
    verdict = judge([*unfit("n3"), *log(PEER, 0)])
    assert short(verdict) == ("gpu-hardware", "node", "drain", ("n3",), ("n3",))


def test_a_check_that_fails_on_most_nodes_is_not_the_nodes() -> None:
    verdict = judge([found for node in NODES[:3] for found in unfit(node)])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())


def test_a_node_that_the_probe_cannot_reach_is_blamed_by_nothing() -> None:
    unreached = detect.probe(NodeReport(node="n2", at=T, reached=False, error="timed out"))
    assert short(judge(unreached)) == ("unknown", "unknown", "restart", (), ())


def test_the_same_exception_on_ranks_of_several_nodes_is_the_programs() -> None:
    verdict = judge([one for rank in (0, 2, 5) for one in raised(f"KeyError: 'x{rank}'", rank, T + rank)])
    assert short(verdict) == ("user-code", "program", "stop", (), ())
    assert (verdict.ranks, verdict.confidence) == ((0, 2, 5), Confidence.HIGH)


def test_the_same_exception_everywhere_outweighs_a_probe() -> None:
    everywhere = [one for rank in range(8) for one in raised("KeyError: 'x'", rank, T)]
    assert short(judge([*everywhere, *unfit("n2")]))[:3] == ("user-code", "program", "stop")


def test_one_ranks_exception_is_the_programs_and_its_peers_are_victims() -> None:
    verdict = judge([*raised("KeyError: 'labels'", 3), *log(PEER, 0, T - 0.5), *log(PEER, 5, T + 1)])
    assert short(verdict) == ("user-code", "program", "stop", (), ())
    assert (verdict.ranks, verdict.confidence) == ((3,), Confidence.MEDIUM)
    assert "Rank 3 on n2 failed" in verdict.summary
    assert "KeyError: 'labels'" in verdict.summary


def test_survivors_of_a_lost_node_that_all_raise_the_same_are_not_to_blame() -> None:
    survivors = [one for rank in (0, 1, 4, 5, 6) for one in raised("RuntimeError: peer lost", rank, T + 2)]
    assert short(judge([detect.heartbeat_lost("n2", T), *survivors]))[:4] == ("host", "node", "exclude", ("n2",))
    assert short(judge([down("n2", T + 300), *survivors]))[:4] == ("host", "node", "drain", ("n2",))


def test_an_exception_long_before_a_lost_heartbeat_came_first() -> None:
    verdict = judge([*raised("KeyError: 'labels'", 3, T), detect.heartbeat_lost("n1", T + 120)])
    assert verdict.blame is Blame.PROGRAM


def test_the_kernel_beats_what_ranks_say() -> None:
    verdict = judge([*xid("n2", 79, T - 60), *raised("KeyError: 'labels'", 5, T)])
    assert short(verdict) == ("gpu-hardware", "node", "exclude", ("n2",), ())


def test_an_echo_in_the_kernel_log_blames_nobody() -> None:
    verdict = judge([*xid("n2", 45, T), *xid("n2", 43, T), *xid("n2", 63, T), *xid("n2", 154, T)])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())


def test_a_kernel_line_and_the_probe_together_drain_and_the_telling_class_wins() -> None:
    verdict = judge([*xid("n2", 95, T), detect.heartbeat_lost("n2", T + 5), down("n2", T + 30)])
    assert short(verdict) == ("gpu-memory", "node", "drain", ("n2",), ("n2",))


def test_an_ecc_error_of_a_rank_excludes_its_node() -> None:
    verdict = judge([*log(ECC, 3, T), *log(PEER, 0, T + 1)])
    assert short(verdict) == ("gpu-memory", "node", "exclude", ("n2",), ())


def test_the_earliest_line_over_all_nodes_wins() -> None:
    for order in itertools.permutations([*log(ECC, 3, T), *raised("ValueError: x", 5, T + 3), *log(PEER, 0, T - 2)]):
        assert judge(order).failure_class is FailureClass.GPU_MEMORY


def test_an_error_that_most_nodes_show_is_no_nodes() -> None:
    verdict = judge([one for rank in (0, 2, 4) for one in log(ECC, rank, T + rank)])
    assert short(verdict) == ("gpu-memory", "unknown", "restart", (), ())


def test_out_of_memory_is_the_programs() -> None:
    verdict = judge([*kernel("n2", "Memory cgroup out of memory: Killed process 4411 (python3) x"), *exits(137, 3)])
    assert short(verdict) == ("host-memory", "program", "stop", (), ())


def test_a_kill_without_a_word_is_unknown() -> None:
    verdict = judge([*exits(137, 3), *log(PEER, 0, T + 1)])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert verdict.ranks == (3,)
    assert "killed by SIGKILL" in verdict.summary
    assert "Rank 3 on n2" in verdict.summary


def test_a_rank_killed_after_another_had_failed_is_not_the_cause() -> None:
    verdict = judge([*exits(1, 5, at=T), *exits(137, 3, at=T + 1)])
    assert verdict.ranks == (5,)


OWN_WORDS = "RingBroken: rank 3 has left"


@pytest.mark.parametrize(("ranks", "after_s"), [((0,), 0.0), ((0,), 0.5), ((0, 2, 4, 6), 0.5)])
def test_what_others_raise_once_a_rank_was_killed_is_no_cause(ranks: tuple[int, ...], after_s: float) -> None:
    own = [one for rank in ranks for one in raised(OWN_WORDS, rank, T + after_s)]
    verdict = judge([*exits(137, 3), *own])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert (verdict.ranks, "killed by SIGKILL" in verdict.summary) == ((3,), True)


@pytest.mark.parametrize("code", [1, 134, 139])
def test_what_others_raise_once_a_rank_has_ended_badly_is_no_cause(code: int) -> None:
    verdict = judge([*exits(code, 3), *raised(OWN_WORDS, 0, T + 0.5)])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert verdict.ranks == (3,)


def test_what_all_ranks_raise_is_the_programs_also_where_one_of_them_crashes_over_it() -> None:
    verdict = judge([*exits(139, 3), *[one for rank in range(8) for one in raised(OWN_WORDS, rank, T)]])
    assert short(verdict) == ("user-code", "program", "stop", (), ())


def test_what_is_raised_while_a_hang_is_ended_is_no_cause() -> None:
    hang = detect.no_progress(Stall(step=7, seconds=900, limit=600), T)
    for rank in (0, None):
        assert judge([*hang, *raised(OWN_WORDS, rank, T + 0.5)]).action is Action.RESTART
    assert judge([*raised(OWN_WORDS, 0, T - 900), *hang]).action is Action.STOP


@pytest.mark.parametrize("code", [137, 139, 135, 143])
def test_what_others_raise_shortly_before_srun_tells_of_a_signal_is_no_cause(code: int) -> None:
    verdict = judge([*raised(OWN_WORDS, 0, T), *exits(code, 3, at=T + 0.5)])
    assert (verdict.action, verdict.blame, verdict.failure_class) == (Action.RESTART, Blame.UNKNOWN, "unknown")


@pytest.mark.parametrize(
    "said",
    [
        "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
        "FileNotFoundError: [Errno 2] No such file or directory: '/run/step-7/rank-3.json'",
        "_pickle.UnpicklingError: pickle data was truncated",
    ],
)
def test_what_a_lost_peer_also_causes_is_no_cause_once_a_rank_was_killed(said: str) -> None:
    assert judge(raised(said, 0)).action is not Action.RESTART
    verdict = judge([*exits(137, 3), *raised(said, 0, T + 1)])
    assert (verdict.action, verdict.ranks) == (Action.RESTART, (3,))


@pytest.mark.parametrize(("code", "action"), [(-9, "restart"), (-11, "restart"), (-6, "stop"), (1, "stop")])
def test_what_others_raise_as_torchrun_tells_of_a_signal_is_no_cause(code: int, action: str) -> None:
    told = f"E1130 16:42:41.3 139 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code})"
    torchrun = log(
        f"{told} local_rank: 1 (pid: 180) of binary: /usr/bin/python3", None, T + 0.5, "n2", "rank-00001.log"
    )
    unlabelled = raised(OWN_WORDS, 0, T)
    own = [replace(one, rank=None, node="n1") for one in unlabelled]
    left = [replace(one, rank=None) for one in exits(1, 3, at=T + 6)]
    assert judge([*own, *torchrun, *left]).action == action


def test_that_srun_ends_what_is_left_hides_nothing_of_what_all_ranks_left_with() -> None:
    left = [one for rank in range(8) for one in exits(3, rank)]
    teardown = log("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", at=T + 6)
    assert judge([*left, *teardown]).action is Action.STOP
    assert judge([*left, *teardown, *log(PEER, 0)]).action is Action.RESTART


def test_a_program_that_is_no_python_is_stopped_unless_it_is_so_on_few_nodes_alone() -> None:
    error = '  File "/x/t.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax'
    everywhere = [one for rank in range(8) for one in log(error, rank)]
    assert short(judge(everywhere)) == ("user-code", "program", "stop", (), ())
    assert judge(log(error, 2)).action is Action.RESTART


def test_what_stands_below_torchruns_word_in_a_file_without_a_time_of_its_own_is_a_cause() -> None:
    told = "E1130 16:42:41.3 139 api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 180) of binary: python3"
    below = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nKeyError: 3\n'
    matcher = Matcher(live=False)
    matcher.feed(Chunk(file="slurm-7.out", data=f"{told}\n{below}".encode(), fresh=True), T)
    matcher.finish()
    assert fuse(matcher.evidence(), nodes=(), ranks_by_node={}).action is Action.STOP


SPAWN_KILLED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"


def test_that_all_leave_alike_once_a_launcher_told_of_a_killed_rank_is_no_fault_of_the_program() -> None:
    left = [one for rank in range(8) for one in exits(1, rank, at=T + 1)]
    assert judge(left).action is Action.STOP
    assert judge([*raised(SPAWN_KILLED, 3), *left]).action is Action.RESTART
    own = raised(OWN_WORDS, 0, T - 0.5)
    assert judge([*own, *left]).action is Action.STOP
    assert judge([*own, *raised(SPAWN_KILLED, 3), *left]).action is Action.RESTART


def test_what_is_raised_before_a_rank_is_killed_or_with_its_abort_is_a_cause() -> None:
    stops = ("user-code", "program", "stop", (), ())
    assert short(judge([*raised(OWN_WORDS, 0, T), *exits(137, 3, at=T + 10)])) == stops
    assert short(judge([*raised(OWN_WORDS, 0, T), *exits(134, 3, at=T)])) == stops
    assert short(judge([*raised(OWN_WORDS, 3, T), *exits(137, 3, at=T)])) == stops
    assert short(judge([*exits(1, 0), *exits(137, 3), *raised(OWN_WORDS, 0, T)])) == stops


def test_of_srun_lines_read_at_once_the_first_bad_end_counts() -> None:
    lines = "srun: error: n3: task 5: Exited with exit code 1\nsrun: error: n1: tasks 0-1: Killed"
    verdict = judge([*log(lines, at=T), *srun.exits(lines, T)])
    assert verdict.ranks == (5,)
    assert "ended with code 1" in verdict.summary


def test_a_task_that_srun_reports_killed_first_was_killed() -> None:
    lines = "srun: error: n2: task 2: Killed\nsrun: error: n1: tasks 0-1: Killed"
    verdict = judge([*log(lines, at=T), *srun.exits(lines, T)])
    assert (verdict.ranks, verdict.blame) == ((2,), Blame.UNKNOWN)
    assert "killed by SIGKILL" in verdict.summary


def test_ranks_that_were_told_to_end_are_not_the_cause() -> None:
    assert judge(exits(143, 0, 1, 2)).ranks == ()


def test_all_ranks_with_the_same_code_and_no_complaints_are_the_program() -> None:
    verdict = judge(exits(2, *range(8)))
    assert short(verdict) == ("user-code", "program", "stop", (), ())
    assert "Every rank (8) exited with code 2" in verdict.summary


def test_all_ranks_with_the_same_code_after_a_peer_went_are_not() -> None:
    verdict = judge([*exits(1, *range(8)), *log(PEER, 0)])
    assert verdict.blame is Blame.UNKNOWN
    assert "no log says why. The first to complain was rank 0 on n1: RuntimeError: [/x/gloo" in verdict.summary


def test_of_a_job_that_fails_at_its_start_by_consequences_alone_the_first_words_are_told() -> None:
    refused = "ConnectionRefusedError: [Errno 111] Connection refused"
    said = [one for rank in range(8) for one in raised(refused, rank, T + rank)]
    verdict = judge([*exits(1, *range(8), at=T + 9), *said])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert f"The first to complain was rank 0 on n1: {refused}. The job can start again" in verdict.summary
    assert verdict.evidence[0].source == "exit", "by which the next failure is compared"


def test_a_stopped_rank_is_named_and_nobody_blamed() -> None:
    stall = detect.no_progress(Stall(61, 60, 12), T, [detect.ProcessState(3, "n2", 4711, "T")])
    verdict = judge(stall)
    assert short(verdict) == ("nccl-hang", "unknown", "restart", (), ())
    assert verdict.ranks == (3,)
    assert "rank 3 on n2 is stopped" in verdict.summary


def test_a_stall_of_which_nothing_is_known() -> None:
    verdict = judge(detect.no_progress(Stall(61, 60, 12), T))
    assert short(verdict) == ("nccl-hang", "unknown", "restart", (), ())
    assert verdict.ranks == ()
    assert "Nothing says which rank is stuck" in verdict.summary


def timeout(rank: int, sequence: int = 88, operation: str = "ALLREDUCE") -> list[Evidence]:
    return log(
        f"[rank{rank}]:[E302 x.cpp:1] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={sequence}, OpType={operation}, Timeout(ms)=600000) ran for 600051 milliseconds",
        rank,
    )


def test_the_rank_that_does_not_time_out_is_the_suspect() -> None:
    verdict = judge([one for rank in (0, 1, 2, 4, 5, 6, 7) for one in timeout(rank)])
    assert (verdict.failure_class, verdict.ranks, verdict.nodes) == (FailureClass.NCCL_HANG, (3,), ())


def test_the_rank_with_fewer_operations_is_the_suspect() -> None:
    verdict = judge([one for rank in range(8) for one in timeout(rank, 88 if rank != 5 else 87)])
    assert verdict.ranks == (5,)


def test_ranks_in_different_operations_are_the_programs() -> None:
    verdict = judge([one for rank in range(8) for one in timeout(rank, 88, "BROADCAST" if rank == 6 else "ALLREDUCE")])
    assert short(verdict)[:3] == ("user-code", "program", "stop")
    assert verdict.ranks == (6,)


def test_a_hang_that_hits_everybody_alike_names_nobody() -> None:
    assert judge([one for rank in range(8) for one in timeout(rank)]).ranks == ()


def test_the_same_rank_behind_twice_makes_its_node_suspect() -> None:
    hang = [one for rank in (0, 1, 2, 4, 5, 6, 7) for one in timeout(rank)]
    first = judge(hang)
    assert first.blame is Blame.UNKNOWN
    second = judge(hang, [first])
    assert short(second) == ("nccl-hang", "node", "exclude", ("n2",), ())


def victim(printer: int, peer: str) -> list[Evidence]:
    line = f"x:1:2 [0] NCCL WARN NET/IB : Got completion from peer {peer}<44206> with status=12 opcode=0 len=1"
    return log(line.replace("x:1:2 ", ""), printer)


def test_victims_vote_for_the_peer_that_they_name() -> None:
    verdict = judge([*victim(0, "n3"), *victim(2, "n3"), *victim(6, "n1")])
    assert short(verdict) == ("network", "node", "exclude", ("n3",), ())


def test_votes_for_an_address_count_for_the_node_that_has_it() -> None:
    evidence = [e for rank in (0, 4, 6) for e in log(PEER, rank)]
    assert judge(evidence).nodes == ()
    named = fuse(evidence, nodes=NODES, ranks_by_node=RANKS, addresses={"10.9.0.2": "n2", "10.9.0.9": "n9"})
    assert (named.blame, named.nodes) == (Blame.NODE, ("n2",))
    foreign = fuse(evidence, nodes=NODES, ranks_by_node=RANKS, addresses={"10.9.0.2": "n9"})
    assert foreign.nodes == ()


def test_an_address_is_a_nodes_only_where_no_other_has_it() -> None:
    told = {"n1": "10.9.0.1", "n2": "10.9.0.2", "n3": "10.9.0.2", "n4": "127.0.0.1", "n5": "n5", "n6": "fe80::6"}
    assert by_address(told) == {"10.9.0.1": "n1", "fe80::6": "n6"}


def test_one_vote_is_none() -> None:
    assert judge(victim(0, "n3")).blame is Blame.UNKNOWN


def test_votes_against_a_node_whose_rank_left_by_itself_do_not_count() -> None:
    assert judge([*victim(0, "n3"), *victim(2, "n3"), *exits(1, 4)]).blame is Blame.UNKNOWN


def test_victims_are_never_blamed() -> None:
    verdict = judge([*log(PEER, 0), *log(PEER, 2), *log("RuntimeError: NCCL communicator was aborted on rank 4.", 4)])
    assert verdict.blame is Blame.UNKNOWN
    assert verdict.nodes == ()


def test_those_who_went_without_a_word_are_named_for_a_look() -> None:
    verdict = judge([one for rank in (0, 1, 2, 4, 5, 6, 7) for one in log(PEER, rank)])
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())
    assert verdict.ranks == (3,)


@pytest.mark.parametrize(
    ("base", "failure_class", "action"),
    [
        (JobBase.TIMEOUT, FailureClass.TIME_LIMIT, Action.RESTART),
        (JobBase.PREEMPTED, FailureClass.PREEMPTION, Action.RESTART),
        (JobBase.CANCELLED, FailureClass.CANCELLED, Action.NONE),
        (JobBase.DEADLINE, FailureClass.TIME_LIMIT, Action.STOP),
    ],
)
def test_what_slurm_or_a_person_ended_is_nobodys_failure(
    base: JobBase, failure_class: FailureClass, action: Action
) -> None:
    verdict = judge([*raised("KeyboardInterrupt", 0, T + 1), *raised("ValueError: x", 1, T + 2), *ended(base)])
    assert (verdict.failure_class, verdict.blame, verdict.action) == (failure_class, Blame.EXTERNAL, action)
    assert verdict.confidence is Confidence.HIGH


def test_a_line_about_the_time_limit_that_anybody_can_print_does_not_hide_an_earlier_failure() -> None:
    line = "slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"
    assert judge([*log(line, at=T)]).failure_class is FailureClass.TIME_LIMIT
    assert judge([*raised("KeyError: 'x'", 1, T), *log(line, at=T + 600)]).blame is Blame.PROGRAM


def test_numbers_that_went_wrong_first_decide_over_the_exceptions_that_follow() -> None:
    nan = log("step 3 loss: nan", 0, T)
    crash = [one for rank in range(8) for one in raised("FloatingPointError: not finite", rank, T + 1)]
    assert judge([*nan, *crash]).action is Action.ROLLBACK


def test_an_old_line_is_of_another_failure() -> None:
    assert judge([*log(ECC, 3, T - 7200), *exits(137, 5, at=T)]).failure_class is FailureClass.UNKNOWN


def test_a_fault_that_stays_on_a_node_is_the_nodes_and_one_that_moves_the_programs() -> None:
    first = judge(log(ILLEGAL, 3, T))
    assert short(first) == ("user-code", "unknown", "restart", (), ())
    again = judge(log(ILLEGAL, 2, T + 600), [first])
    assert short(again) == ("user-code", "node", "exclude", ("n2",), ())
    moved = judge(log(ILLEGAL, 7, T + 600), [first])
    assert short(moved) == ("user-code", "program", "stop", (), ())


def test_what_comes_again_on_most_nodes_is_no_nodes() -> None:
    once = judge([one for rank in range(8) for one in log(ILLEGAL, rank, T + rank / 10)])
    assert (once.blame, once.nodes) == (Blame.UNKNOWN, ())
    again = judge([one for rank in range(8) for one in log(ILLEGAL, rank, T + 600 + rank / 10)], [once])
    assert short(again) == ("user-code", "program", "stop", (), ())
    assert "each time on most nodes" in again.summary


def test_a_hang_of_all_that_comes_again_excludes_no_node() -> None:
    hung = [judge([one for rank in range(8) for one in timeout(rank)]) for at in (T, T + 900)]
    again = judge([one for rank in range(8) for one in timeout(rank)], hung)
    assert (again.action, again.nodes) == (Action.RESTART, ())


def test_another_failure_before_does_not_count_as_again() -> None:
    first = judge(exits(137, 3))
    assert judge(log(ILLEGAL, 3, T), [first]).blame is Blame.UNKNOWN
    assert judge(exits(137, 3), [first]).blame is Blame.UNKNOWN


def test_a_node_that_is_not_of_the_job_is_nobodys_to_blame() -> None:
    verdict = judge(log("srun: error: Node failure on head1"))
    assert short(verdict) == ("unknown", "unknown", "restart", (), ())


def test_a_full_name_is_the_jobs_node() -> None:
    assert judge(log("srun: error: Node failure on n3.cluster.example")).nodes == ("n3",)


OPPOSITE = {
    "illegal access": ILLEGAL,
    "input/output error": "OSError: [Errno 5] Input/output error: '/data/shard-3.bin'",
    "read-only": "OSError: [Errno 30] Read-only file system: '/scratch/a'",
    "no such program": "slurmstepd: error: execve(): torchrun: No such file or directory",
    "missing GPU": "RuntimeError: CUDA error: invalid device ordinal",
    "no GPU": "RuntimeError: No CUDA GPUs are available",
    "illegal instruction": "srun: error: n2: task 2: Illegal instruction (core dumped)",
    "killed": "srun: error: n2: task 2: Killed",
    "memory of others": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.10 GiB is free. Process 4411 has 70.00 GiB memory in use.",
    "loss is NaN": "AssertionError: Rank 2: found NaN in local grad norm in backward pass before data-parallel "
    "communication collective. Device: 3, node: n2",
    "retry exceeded": "n2:4411:4480 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
    "10.9.0.2<45678> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid x",
}


@pytest.mark.parametrize("line", OPPOSITE.values(), ids=list(OPPOSITE))
def test_words_that_a_guilty_node_and_an_innocent_one_both_print_blame_nobody_at_first(line: str) -> None:
    """The same words mean the opposite on one node and on all, or with what the kernel says later."""
    verdict = judge(log(line, 2))
    assert (verdict.blame, verdict.nodes, verdict.drainable) == (Blame.UNKNOWN, (), ())
    assert verdict.action in (Action.RESTART, Action.WAIT, Action.ROLLBACK), "nothing is stopped for it, either"
    assert verdict.confidence is Confidence.LOW


@pytest.mark.parametrize("what", ["no such program", "missing GPU"])
def test_what_is_missing_on_every_node_is_the_programs_and_on_one_node_twice_the_nodes(what: str) -> None:
    line = OPPOSITE[what]
    everywhere = judge([one for rank in range(8) for one in log(line, rank)])
    assert (everywhere.blame, everywhere.action) == (Blame.PROGRAM, Action.STOP)
    again = judge(log(line, 2, T + 300), previous=[judge(log(line, 2))])
    assert (again.blame, again.nodes, again.action, again.drainable) == (Blame.NODE, ("n2",), Action.EXCLUDE, ())


def test_the_piece_that_decided_comes_first() -> None:
    verdict = judge([*log(PEER, 0, T - 5), *log(ECC, 3, T)])
    assert verdict.evidence[0].signature == "CUDA-ECC"
    assert len(verdict.evidence) == 2


SOURCES = st.sampled_from(["log", "kernel", "slurm", "exit", "heartbeat", "progress", "probe", "process", "other"])
ANY = st.builds(
    Evidence,
    source=SOURCES,
    signature=st.sampled_from(
        ["HEARTBEAT-LOST", "SLURM-NODE-DOWN", "EXIT", "EXIT-SIGKILL", "PG-TIMEOUT", "NO-PROGRESS"]
    )
    | st.text(max_size=5),
    text=st.text(max_size=60),
    role=st.sampled_from(list(Role)),
    failure_class=st.sampled_from(list(FailureClass)),
    blame=st.sampled_from(list(Blame)),
    action=st.sampled_from(list(Action)),
    at=st.none() | st.floats(0, 2e9) | st.floats(),
    node=st.sampled_from(["", *NODES, "other"]),
    rank=st.none() | st.integers(-1, 9),
    peer_nodes=st.lists(st.sampled_from([*NODES, "other"]), max_size=2).map(tuple),
    peer_ranks=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    forgeable=st.booleans(),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(ANY, max_size=12), st.booleans())
def test_whatever_the_evidence_the_promises_hold(evidence: list[Evidence], known: bool) -> None:
    verdict = fuse(evidence, nodes=NODES if known else (), ranks_by_node=RANKS if known else {})
    sure = [one for one in evidence if not one.forgeable and one.role is Role.ROOT and one.blame is Blame.NODE]
    assert set(verdict.drainable) <= set(verdict.nodes)
    for node in verdict.drainable:
        assert any(node == one.node or one.rank in RANKS.get(node, ()) for one in sure)
    assert (verdict.action is Action.DRAIN) == bool(verdict.drainable)
    assert verdict.action is not Action.EXCLUDE or verdict.nodes
    assert verdict.blame is not Blame.UNKNOWN or verdict.nodes == ()
    assert not known or set(verdict.nodes) <= set(NODES)
    assert verdict.summary.strip()


def test_a_node_that_is_down_is_lost_though_srun_only_says_that_it_cannot_start_there() -> None:
    line = "srun: error: Task launch for StepId=2.2 failed on node n3: Communication connection failure"
    srun = log(line, at=T - 30, file="srun.log")
    assert judge([*srun, down("n3")]).failure_class is FailureClass.HOST
    assert judge(srun).failure_class is FailureClass.LAUNCHER


def test_a_missing_library_on_one_node_of_a_job_that_has_run_is_that_nodes_mount() -> None:
    """A restart on a spare whose mount is missing must not end a job of weeks; what never ran is its user's."""
    missing = raised("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory", 2)
    lost = judge([down("n4")])
    first = judge(missing)
    assert (first.action, first.blame) == (Action.STOP, Blame.PROGRAM)
    later = judge(missing, [lost])
    assert (later.action, later.blame, later.nodes) == (Action.RESTART, Blame.UNKNOWN, ())
    again = judge(missing, [lost, later])
    assert (again.action, again.blame, again.nodes) == (Action.EXCLUDE, Blame.NODE, ("n2",))
    everywhere = [one for rank in range(8) for one in raised("ModuleNotFoundError: No module named 'x'", rank)]
    assert judge(everywhere, [lost]).action is Action.STOP


DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-00017.tar'"


def test_a_missing_file_on_one_node_of_a_job_that_has_run_may_be_that_nodes_mount() -> None:
    """What stays on a node is the node's, what moves to another is the program's."""
    first = judge(raised(NO_FILE, 2))
    assert (first.action, first.blame) == (Action.STOP, Blame.PROGRAM)
    ran = judge(raised(NO_FILE, 2), has_run=True)
    assert (ran.action, ran.blame, ran.nodes) == (Action.RESTART, Blame.UNKNOWN, ())
    here = judge(raised(NO_FILE, 2), [ran], has_run=True)
    assert (here.action, here.blame, here.nodes) == (Action.EXCLUDE, Blame.NODE, ("n2",))
    elsewhere = judge(raised(NO_FILE, 5), [ran], has_run=True)
    assert (elsewhere.action, elsewhere.blame) == (Action.STOP, Blame.PROGRAM)
    everywhere = [one for rank in range(8) for one in raised(NO_FILE, rank)]
    assert judge(everywhere, has_run=True).action is Action.STOP


def test_a_missing_file_that_the_program_made_up_for_is_no_cause_of_what_it_raised_then() -> None:
    chain = DURING
    caught = raised(f"{NO_FILE}{chain}\n  File \"train.py\", line 12, in <module>\nKeyError: 'labels'", 2)
    verdict = judge(caught, has_run=True)
    assert (verdict.action, verdict.blame, verdict.evidence[0].signature) == (
        Action.STOP,
        Blame.PROGRAM,
        "PY-EXCEPTION",
    )


@pytest.mark.parametrize(
    ("first", "signature"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "CUDA-ECC"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA-OOM"),
    ],
)
def test_a_dump_that_finds_no_folder_hides_no_cause(first: str, signature: str) -> None:
    told = raised(f'{first}{DURING}\n  File "train.py", line 12, in <module>\n{NO_FILE}', 2)
    assert judge(told, has_run=True).evidence[0].signature == signature


def test_a_missing_file_that_was_made_up_for_hides_no_other() -> None:
    """Nor is a line that merely speaks of one taken for the end of a rank."""
    matcher = Matcher()

    def lines(text: str, now: float) -> list[str]:
        found = matcher.feed(Chunk(file="rank-00000.log", data=text.encode(), rank=0), now)
        return [one.signature for one in [*found, *matcher.finish()]]

    assert lines(f"WARNING cache miss: {NO_FILE}, falling back\n", 100.0) == []
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    assert lines(f"{trace}FileNotFoundError: [Errno 2] No such file or directory: '/cache/a'\n", 100.0) == ["PY-NOFILE"]
    assert lines(f"{trace}{NO_FILE}\n", 9000.0) == ["PY-NOFILE"]
    assert [one.at for one in matcher.evidence()] == [100.0, 9000.0]


@pytest.mark.parametrize(
    "exception",
    [
        "ConnectionAbortedError: [Errno 103] Software caused connection abort",
        "OSError: [Errno 113] No route to host",
        "OSError: [Errno 101] Network is unreachable",
        "TimeoutError: [Errno 110] Connection timed out",
        "EOFError",
        "RuntimeError: Connection reset by peer",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
)
def test_what_those_raise_who_are_left_is_no_fault_of_the_program(exception: str) -> None:
    verdict = judge(raised(exception, 1))
    assert (verdict.action, verdict.blame, verdict.nodes) == (Action.RESTART, Blame.UNKNOWN, ()), verdict


def test_a_server_outside_that_is_away_is_waited_for() -> None:
    """A tracker that is down for ten minutes at night, met by one rank, ends no job of weeks."""
    away = (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded"
    )
    verdict = judge(raised(away, 0))
    assert (verdict.action, verdict.blame, verdict.failure_class) == (Action.WAIT, Blame.NETWORK, FailureClass.NETWORK)


def test_a_monitored_barrier_names_the_rank_that_did_not_come() -> None:
    came = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 5."
    verdict = judge([one for rank in (0, 2) for one in raised(f"RuntimeError: Rank {rank} {came}", rank)])
    assert (verdict.action, verdict.nodes) == (Action.EXCLUDE, ("n3",))
