"""A rank that cannot go on: what its peers raise over it is no fault of the program; what it raised itself may be."""

from __future__ import annotations

import pytest
from test_tee_verdict import ECC, OWN_WORDS, RANKS, T, down, ended, exits, judge, kernel, log, raised, short
from transom_slurm.types import JobBase

from transomd.tee import detect
from transomd.tee.progress import Stall
from transomd.tee.types import Evidence
from transomd.words import Action, Blame

HANG = ("nccl-hang", "unknown", "restart", (), ())
STOP = ("user-code", "program", "stop", (), ())
GAVE_UP = "TimeoutError: rank 3 gave no sign for 20 s"
PEERS = (0, 1, 2, 4, 5, 6, 7)
NODE_OF = {rank: node for node, ranks in RANKS.items() for rank in ranks}


def stuck(state: str, *ranks: int, at: float = T + 5) -> list[Evidence]:
    return detect.stuck([detect.ProcessState(rank, NODE_OF[rank], 4000 + rank, state) for rank in ranks], at)


def all_raise(exception: str, *ranks: int | None) -> list[Evidence]:
    return [one for rank in ranks for one in raised(exception, rank)]


@pytest.mark.parametrize("state", ["T", "t", "D"])
@pytest.mark.parametrize("words", [OWN_WORDS, GAVE_UP, "AssertionError: peer did not answer"])
def test_what_peers_raise_and_leave_over_a_stuck_rank_is_no_fault_of_the_program(state: str, words: str) -> None:
    gave_up = [*all_raise(words, *PEERS), *exits(1, *PEERS, at=T + 0.5)]
    assert judge(gave_up).action is not Action.EXCLUDE
    verdict = judge([*stuck(state, 3), *gave_up])
    assert (short(verdict), verdict.ranks) == (HANG, (3,))
    assert "rank 3 on n2" in verdict.summary
    assert words.partition(": ")[2] in verdict.summary


def test_without_a_stuck_rank_the_same_words_stop_the_job() -> None:
    assert short(judge(all_raise(OWN_WORDS, *PEERS))) == STOP


def test_peers_that_leave_without_a_word_are_no_fault_of_the_program_either() -> None:
    assert short(judge([*stuck("T", 3), *exits(1, *PEERS)])) == HANG


def test_a_rank_that_is_stuck_again_on_its_node_leaves_it_out() -> None:
    evidence = [*stuck("T", 3), *all_raise(OWN_WORDS, *PEERS)]
    again = judge(evidence, [judge(evidence)])
    assert short(again) == ("nccl-hang", "node", "exclude", ("n2",), ())


def test_a_person_with_a_debugger_costs_the_job_no_node() -> None:
    evidence = [*stuck("t", 3), *all_raise(OWN_WORDS, *PEERS)]
    again = judge(evidence, [judge(evidence)])
    assert (short(again), again.ranks) == (HANG, (3,))
    assert "rank 3 on n2 is held by a debugger, and the others gave up" in again.summary


def test_what_a_rank_says_of_its_storage_tells_more_than_that_others_wait_for_it() -> None:
    said = raised("OSError: [Errno 5] Input/output error: '/data/shard-7'", 0)
    assert judge([*stuck("D", 3), *said]).failure_class == "storage"
    assert short(judge([*stuck("T", 3), *said])) == HANG


def test_what_all_ranks_raise_is_the_programs_also_where_one_is_stuck_after_it() -> None:
    for state in ("T", "D"):
        assert short(judge([*stuck(state, 3), *all_raise(OWN_WORDS, *range(8))])) == STOP


def test_what_all_ranks_raise_into_one_log_is_the_programs_too() -> None:
    assert short(judge([*stuck("D", 3), *all_raise(OWN_WORDS, *[None] * 8)])) == STOP
    assert short(judge([*stuck("D", 3), *all_raise(OWN_WORDS, *[None] * 7)])) == HANG


def test_what_the_stuck_rank_raised_itself_is_the_cause_of_what_others_raise() -> None:
    own = raised("ValueError: tensor has the wrong shape", 3, T - 30)
    verdict = judge([*stuck("D", 3), *own, *all_raise(GAVE_UP, 0, 1)])
    assert (short(verdict), verdict.ranks) == (STOP, (3,))


@pytest.mark.parametrize("state", ["S", "R", "I"])
def test_a_rank_that_is_at_its_teardown_excuses_nobody(state: str) -> None:
    assert stuck(state, 3) == []
    assert short(judge([*stuck(state, 3), *all_raise(OWN_WORDS, *PEERS)])) == STOP


def test_an_exception_that_no_stuck_peer_causes_is_the_programs() -> None:
    said = all_raise("ModuleNotFoundError: No module named 'flash_attn'", *PEERS)
    assert judge([*stuck("D", 3), *said]).action is Action.STOP


def test_a_gpu_fault_that_a_rank_tells_of_says_why_it_hangs_in_the_driver() -> None:
    for rank in (3, 5):
        verdict = judge([*stuck("D", 3), *log(ECC, rank), *all_raise(GAVE_UP, 0)])
        assert (verdict.blame, verdict.nodes) == (Blame.NODE, (NODE_OF[rank],))
    long_ago = judge([*stuck("T", 3), *log(ECC, 5, T - 900)])
    assert (short(long_ago), long_ago.ranks) == (HANG, (3,))


def test_a_rank_that_dumped_its_core_has_crashed() -> None:
    verdict = judge([*stuck("D", 3), *all_raise(OWN_WORDS, 0), *exits(1, 0), *exits(139, 3, at=T + 9)])
    assert (verdict.action, verdict.failure_class) == (Action.RESTART, "unknown")
    ended = judge([*stuck("T", 3), *exits(137, 3, at=T + 9)])
    assert short(ended) == HANG, "killed by us"


def test_in_a_hang_what_was_raised_before_a_stuck_rank_was_found_is_no_fault_of_the_program() -> None:
    stopped = [detect.ProcessState(3, "n2", 4711, "T")]
    hang = detect.no_progress(Stall(step=7, seconds=900, limit=600), T + 900, stopped)
    torn_down = raised("ValueError: torn down", 1, T + 901)
    verdict = judge([*hang, *raised(OWN_WORDS, 0), *torn_down])
    assert short(verdict) == HANG
    assert ("RingBroken" in verdict.summary, "torn down" in verdict.summary) == (True, False)


def test_of_many_stuck_processes_one_a_rank_is_told_and_no_more_than_leave_room_for_the_logs() -> None:
    many = [detect.ProcessState(pid // 2, "n1", pid, "D") for pid in range(1000)]
    found = detect.stuck(many, T)
    assert len({one.rank for one in found}) == len(found) == 50


@pytest.mark.parametrize("state", ["T", "D"])
def test_what_a_rank_that_has_left_leaves_behind_is_no_stuck_rank(state: str) -> None:
    """A logger or a worker of its own has its environment, and outlives it."""
    left = [*stuck(state, 3), *exits(1, *range(8))]
    assert short(judge([*left, *raised("ValueError: bad shape", 0)])) == STOP
    assert short(judge([*left, *all_raise("ValueError: bad shape", *PEERS)])) == STOP
    assert short(judge(left)) == STOP, "all left alike, and nobody complains"
    assert short(judge([*stuck(state, 3), *all_raise(OWN_WORDS, *PEERS), *exits(1, 3, at=T + 9)])) == HANG


def test_a_rank_that_dumps_its_core_over_what_another_raised_does_not_excuse_that() -> None:
    """NCCL's watchdog aborts ranks whose peer has left; writing a core of many gigabytes outlasts two looks."""
    cause = [*raised("ValueError: bad shape", 0), *exits(1, 0)]
    assert short(judge([*stuck("D", 3), *cause, *exits(134, 3, at=T + 9)])) == STOP
    peers = [*all_raise(OWN_WORDS, *PEERS), *exits(1, *PEERS)]
    assert judge([*stuck("D", 3), *peers, *exits(134, 3, at=T + 9)]).action is Action.RESTART


LOST_STEP = "srun: error: Aborting, io error and missing step on node 1"


def test_what_ranks_raise_after_srun_has_lost_one_of_their_slurmstepds_is_no_fault_of_the_program() -> None:
    lost = log(LOST_STEP, file="srun.log")
    assert short(judge([*lost, *(one for rank in PEERS for one in raised(OWN_WORDS, rank, T + 2))])) == (
        "launcher",
        "unknown",
        "restart",
        (),
        (),
    )
    assert short(judge([*lost, *(one for rank in PEERS for one in raised(OWN_WORDS, rank, T - 20))])) == STOP


def test_why_srun_has_lost_a_slurmstepd_tells_more_than_that() -> None:
    lost = log(LOST_STEP, file="srun.log")
    assert short(judge([*lost, down("n2", T + 60)])) == ("host", "node", "drain", ("n2",), ("n2",))
    assert short(judge([*lost, detect.heartbeat_lost("n2", T + 20)]))[2:4] == ("exclude", ("n2",))
    oom = "Out of memory: Killed process 77 (slurmstepd) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"
    assert judge([*lost, *kernel("n2", oom, T - 3)]).failure_class == "host-memory"
    for end in (JobBase.TIMEOUT, JobBase.PREEMPTED, JobBase.CANCELLED):
        assert judge([*lost, *ended(end, T + 40)]).blame is Blame.EXTERNAL
