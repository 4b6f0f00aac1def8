"""What the launcher keeps of a launch's logs is bounded, and says what it left out."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from transomd.launch.awake import Awake
from transomd.launch.handshake import greet
from transomd.launch.hub import Hub
from transomd.launch.program import SRUN_LOG
from transomd.launch.sruns import SCRIPT_LOG
from transomd.launch.watch import FIRST_EXITS, MAX_EXITS, LogWatch
from transomd.spec import JobSpec
from transomd.tee.progress import DEFAULT_PATTERN, Progress
from transomd.tee.types import Verdict
from transomd.tee.verdict import fuse
from transomd.words import Action, Blame, Role

T = 1_780_000_000.0
SPEC = JobSpec(name="t", command="true", nodes=2, tasks_per_node=1, workdir="/")


def watch(logs: Path) -> LogWatch:
    progress = Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60)
    return LogWatch(logs, SPEC, ("n1", "n2"), progress)


def told(logs: Path, text: str, times: int = 1) -> LogWatch:
    made = watch(logs)
    for number in range(times):
        with (logs / SRUN_LOG).open("a") as file:
            file.write(text)
        made.poll(100.0 + number)
    return made


def test_a_rank_that_ends_again_and_again_is_told_once(tmp_path: Path) -> None:
    made = told(tmp_path, "srun: error: n1: task 0: Exited with exit code 1\n", times=50)
    (one,) = [e for e in made.evidence() if e.source == "exit"]
    assert (one.rank, one.signature, one.at) == (0, "EXIT", 100.0)
    assert made.failing == "rank 0 on n1 ended with code 1"


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Aborting, io error and missing step on node 1",
        "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1",
        "srun: error: Cannot communicate with node 1.  Aborting job.",
        "srun: error: Node failure on n2",
        "srun: error: task 1 launch failed: Invalid job credential",
        "srun: error: Task launch for StepId=7.1 failed on node n2: Communication connection failure",
        "srun: error: Timed out waiting for job step to complete",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: Job step aborted",
    ],
)
def test_an_srun_that_does_not_wait_for_all_tasks_is_noticed(tmp_path: Path, line: str) -> None:
    """In its own log, and in that of a job's script; there not where a program merely speaks of it."""
    assert told(tmp_path, f"srun: warning: something\n{line}\n").left == line
    script = JobSpec(name="t", script="job.sh", nodes=2, workdir="/")
    made = LogWatch(tmp_path, script, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60))
    (tmp_path / SRUN_LOG).unlink()
    (tmp_path / SCRIPT_LOG).write_text(f"it said {line}\n")
    made.poll(100.0)
    assert made.left == ""
    with (tmp_path / SCRIPT_LOG).open("a") as file:
        file.write(f"step 1\n{line}\nstep 2\n")
    made.poll(101.0)
    assert made.left == line


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-30T19:49:09 ***",
        "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-30T19:49:09 DUE TO PREEMPTION ***",
        "slurmstepd: error: *** STEP 7.1 ON n1 FAILED (non-zero exit code or other failure mode) ***",
    ],
)
def test_a_step_that_slurm_told_to_end_is_noticed_in_any_log(tmp_path: Path, line: str) -> None:
    """Also where the program had not come to the end of its own line."""
    (tmp_path / "rank-00001.log").write_text(f"step 16 loss{line}\nstep 17\n")
    assert told(tmp_path, "srun: launching\n").left == line


@pytest.mark.parametrize(("job", "noticed"), [(7, True), (8, False), (71, False)])
def test_the_end_of_another_jobs_step_is_not_this_launchs(tmp_path: Path, job: int, noticed: bool) -> None:
    """As where a program prints the log of the job before."""
    line = "slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-30T19:49:09 ***"
    (tmp_path / "rank-00000.log").write_text(f"{line}\n")
    progress = Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60)
    made = LogWatch(tmp_path, SPEC, ("n1", "n2"), progress, slurm_job_id=job)
    made.poll(100.0)
    assert made.left == (line if noticed else "")


def test_a_word_of_slurmstepd_that_ends_nothing_leaves_exit_code_0_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text(
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed\n"
    )
    assert told(tmp_path, "").left == ""


def test_an_srun_that_waits_for_all_tasks_is_believed(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("srun: Job step aborted\n")
    made = told(tmp_path, "srun: error: _server_write write failed: Bad file descriptor\nsrun: launching\n")
    assert made.left == ""


def test_a_flood_of_bad_ends_is_bounded_and_hides_no_reason(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    )
    made = told(tmp_path, "srun: error: n1: tasks 0-15000: Exited with exit code 1\n", times=5)
    made.poll(200.0, final=True)
    found = made.evidence()
    assert sum(e.source == "exit" for e in found) == MAX_EXITS
    (more,) = [e for e in found if e.signature == "EXIT-MORE"]
    assert more.role is Role.CONTEXT
    assert more.text.startswith(f"srun said {5 * (15001 - MAX_EXITS)} more times")
    reason = next(i for i, e in enumerate(found) if e.rank == 0 and e.source == "log")
    assert reason <= FIRST_EXITS + 1


def test_tasks_that_are_killed_after_the_first_bad_end_are_torn_down_also_later(tmp_path: Path) -> None:
    made = told(tmp_path, "srun: error: n1: task 0: Exited with exit code 1\n")
    with (tmp_path / SRUN_LOG).open("a") as file:
        file.write("srun: error: n2: task 1: Killed\n")
    made.poll(101.0)
    assert [e.role for e in made.evidence() if e.source == "exit"] == [Role.CONTEXT, Role.VICTIM]


def test_a_rank_that_is_ended_while_it_prints_an_exception_ends_no_job(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_text("going on\n")
    made = told(tmp_path, "srun: error: n2: task 1: Killed\n")
    with log.open("a") as file:
        file.write('Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nRingBroken: ')
    made.poll(101.0, final=True)
    verdict = fuse(made.evidence(), nodes=("n1", "n2"), ranks_by_node={"n1": (0,), "n2": (1,)}, has_run=True)
    assert (verdict.action, verdict.blame, verdict.ranks) == (Action.RESTART, Blame.UNKNOWN, (1,))
    assert [e.text.partition("\n")[0] for e in verdict.evidence if e.rank == 0] == ["RingBroken:"]


RAISED = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nKeyError: 7\n'
KILLED = "srun: error: n2: task 1: Killed\n"
FAILED = "srun: error: n1: task 0: Exited with exit code 1\n"


def told_by(logs: Path, *looks: tuple[str, str]) -> tuple[LogWatch, Verdict]:
    """Look at the logs once a minute, each time after rank 0 and srun have printed; return the verdict in the end."""
    made, now = watch(logs), T
    for number, texts in enumerate(looks):
        for name, text in zip(("rank-00000.log", SRUN_LOG), texts, strict=True):
            with (logs / name).open("a") as file:
                file.write(text)
        now = T + 60 * number
        made.poll(now)
    made.poll(now + 1, final=True)
    return made, fuse(made.evidence(), nodes=("n1", "n2"), ranks_by_node={"n1": (0,), "n2": (1,)}, has_run=True)


def steps(first: int, last: int) -> list[tuple[str, str]]:
    return [(f"step {number}\n", "") for number in range(first, last + 1)]


def test_an_exception_after_which_the_program_went_on_ends_no_job(tmp_path: Path) -> None:
    _, verdict = told_by(tmp_path, *steps(1, 2), (RAISED, ""), *steps(3, 6), ("", KILLED))
    assert (verdict.action, verdict.blame, verdict.ranks) == (Action.RESTART, Blame.UNKNOWN, (1,))
    assert [e.role for e in verdict.evidence if e.signature == "PY-EXCEPTION"] == [Role.CONTEXT]


@pytest.mark.parametrize("after", [steps(3, 4), [("", FAILED), *steps(3, 9)]])
def test_an_exception_after_which_only_steps_under_way_ended_is_a_cause(
    tmp_path: Path, after: list[tuple[str, str]]
) -> None:
    _, verdict = told_by(tmp_path, *steps(1, 2), (RAISED, ""), *after, ("", KILLED))
    assert (verdict.action, verdict.blame, verdict.ranks) == (Action.STOP, Blame.PROGRAM, (0,))


def told_by_another(
    logs: Path, *, words: str = "", before: str = "", took_s: int = 4, launcher: str = "srun"
) -> Verdict:
    """Task 1 raises, and ends by itself so much later; task 0 goes on meanwhile. Return the verdict."""
    spec = JobSpec(
        name="t", command="t", launcher=launcher, nodes=2, tasks_per_node=2 - (launcher == "srun"), workdir="/"
    )
    made = LogWatch(logs, spec, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0))
    (logs / "rank-00001.log").write_text(RAISED)
    for fifth in range(5 * took_s):
        (logs / "rank-00000.log").write_text("".join(f"step {number}\n" for number in range(fifth + 2)))
        made.poll(T + fifth / 5)
    with (logs / "rank-00001.log").open("a") as file:
        file.write(words)
    (logs / SRUN_LOG).write_text(before + "srun: error: n2: task 1: Exited with exit code 1\n")
    made.poll(T + took_s)
    made.poll(T + took_s + 1, final=True)
    ranks = {"n1": (0,), "n2": (1,)} if launcher == "srun" else {"n1": (0, 1), "n2": (2, 3)}
    return fuse(made.evidence(), nodes=("n1", "n2"), ranks_by_node=ranks, has_run=True)


TEARS_DOWN = "torch/distributed/elastic/multiprocessing/api.py:900] Sending process 7013 closing signal SIGTERM\n"


@pytest.mark.parametrize(
    ("launcher", "words", "ranks"), [("srun", "", (1,)), ("torchrun", TEARS_DOWN, ())], ids=["srun", "torchrun"]
)
def test_the_last_words_of_a_rank_that_ends_slowly_are_a_cause_however_far_others_go_on(
    tmp_path: Path, launcher: str, words: str, ranks: tuple[int, ...]
) -> None:
    verdict = told_by_another(tmp_path, launcher=launcher, words=words)
    assert (verdict.action, verdict.blame, verdict.ranks) == (Action.STOP, Blame.PROGRAM, ranks)


@pytest.mark.parametrize(
    "more",
    [
        {"before": "srun: error: n1: task 0: Killed\n"},
        {"words": "RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.9.0.2]:23451\n"},
        {"took_s": 35},
    ],
    ids=["another-ended-first", "it-said-more", "long-ago"],
)
def test_what_a_rank_raised_before_it_ended_for_something_else_is_no_cause(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    assert told_by_another(tmp_path, **more).blame is not Blame.PROGRAM


def test_an_exception_that_was_made_up_for_and_comes_again_is_a_cause_of_its_later_time(tmp_path: Path) -> None:
    made, verdict = told_by(tmp_path, *steps(1, 2), (RAISED, ""), *steps(3, 6), (RAISED, ""), ("", FAILED))
    assert (verdict.action, verdict.blame) == (Action.STOP, Blame.PROGRAM)
    (at,) = [e.at for e in made.evidence() if e.signature == "PY-EXCEPTION"]
    assert at is not None
    assert at >= T + 60 * 7


def test_numbers_that_went_wrong_are_not_made_up_for_by_going_on(tmp_path: Path) -> None:
    wrong = "Correct result (but possible Application error)\n"
    _, verdict = told_by(tmp_path, *steps(1, 2), (wrong, ""), *steps(3, 6), ("", KILLED))
    assert verdict.failure_class == "numeric"


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    ("job", "line", "node", "rank"),
    [
        ({"launcher": "torchrun", "command": "t.py"}, ECC, "n2", None),
        ({"launcher": "torchrun", "command": "t.py"}, f"[rank3]: {ECC}", "n2", 3),
        ({"script": "/t.sbatch"}, ECC, "", None),
        ({"script": "/t.sbatch"}, f"[rank3]: {ECC}", "n2", 3),
        ({"command": "true"}, ECC, "n1", 1),
    ],
)
def test_a_log_that_ranks_share_names_no_rank_and_no_node_that_it_is_not_sure_of(
    tmp_path: Path, job: dict[str, str], line: str, node: str, rank: int | None
) -> None:
    spec = JobSpec(name="t", nodes=2, tasks_per_node=2, workdir="/", **job)
    (tmp_path / ("rank-00000.log" if spec.script else "rank-00001.log")).write_text(f"step 7\n{line}")
    made = LogWatch(tmp_path, spec, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0))
    made.poll(T)
    (found,) = made.evidence()
    assert (found.node, found.rank, made.step) == (node, rank, 7)
    verdict = fuse([found], nodes=("n1", "n2"), ranks_by_node={"n1": (0, 1), "n2": (2, 3)})
    assert verdict.nodes == ((node,) if node else ())


def test_srun_tells_of_torchruns_and_not_of_ranks(tmp_path: Path) -> None:
    spec = JobSpec(name="t", launcher="torchrun", command="t.py", nodes=2, tasks_per_node=2, workdir="/")
    (tmp_path / SRUN_LOG).write_text("srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed\n")
    made = LogWatch(tmp_path, spec, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0))
    made.poll(T)
    ends = [(e.node, e.rank, e.role) for e in made.evidence() if e.source == "exit"]
    assert ends == [("n2", None, Role.CONTEXT), ("n1", None, Role.VICTIM)]
    assert {e.rank for e in made.evidence()} == {None}


def test_what_another_nodes_torchrun_raises_once_one_was_killed_is_no_cause(tmp_path: Path) -> None:
    spec = JobSpec(name="t", launcher="torchrun", command="t.py", nodes=2, tasks_per_node=2, workdir="/")
    made = LogWatch(tmp_path, spec, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0))
    (tmp_path / SRUN_LOG).write_text(KILLED)
    made.poll(T)
    (tmp_path / "rank-00000.log").write_text(RAISED)
    made.poll(T + 1, final=True)
    verdict = fuse(made.evidence(), nodes=("n1", "n2"), ranks_by_node={"n1": (0, 1), "n2": (2, 3)}, has_run=True)
    assert (verdict.action, verdict.blame) == (Action.RESTART, Blame.UNKNOWN)
    assert verdict.summary.startswith("A rank on n2 was killed by SIGKILL")


LABELLED = "".join(f"[rank1]: {line}\n" for line in RAISED.splitlines())
SEGFAULT = "failed (exitcode: -11) local_rank: 1 (pid: 180) of binary: /usr/bin/python3\n"
LEFT = SEGFAULT.replace("-11", "1")


@pytest.mark.parametrize(
    ("said", "other", "end"),
    [
        (RAISED, "", LEFT),
        (RAISED * 2, RAISED * 2, LEFT),
        (LABELLED, "", LEFT),
        (LABELLED, "", SEGFAULT),
        (RAISED * 2, RAISED * 2, SEGFAULT),
        ("ValueError: bad shape\n", "", LEFT),
    ],
    ids=["one", "all", "named", "named-crashes", "all-crash", "without-traceback"],
)
def test_what_is_read_together_with_torchruns_word_of_the_end_is_a_cause(
    tmp_path: Path, said: str, other: str, end: str
) -> None:
    spec = JobSpec(name="t", launcher="torchrun", command="t.py", nodes=2, tasks_per_node=2, workdir="/")
    made = LogWatch(tmp_path, spec, ("n1", "n2"), Progress(DEFAULT_PATTERN, now=0.0))
    stamp = datetime.fromtimestamp(T - 0.4).strftime("E%m%d %H:%M:%S.%f")
    (tmp_path / "rank-00000.log").write_text(f"{said}{stamp} 139 api.py:1002] {end}")
    (tmp_path / "rank-00001.log").write_text(other)
    made.poll(T)
    (tmp_path / SRUN_LOG).write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    made.poll(T + 3, final=True)
    verdict = fuse(made.evidence(), nodes=("n1", "n2"), ranks_by_node={"n1": (0, 1), "n2": (2, 3)}, has_run=True)
    assert (verdict.action, verdict.blame) == (Action.STOP, Blame.PROGRAM)


def test_a_peer_named_by_its_address_gets_its_nodes_name(tmp_path: Path) -> None:
    line = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.9.0.2]:23451\n"
    (tmp_path / "rank-00000.log").write_text(line)
    made = watch(tmp_path)
    made.poll(100.0, final=True)
    assert [e.peer_nodes for e in made.evidence()] == [("10.9.0.2",)]
    assert [e.peer_nodes for e in made.evidence({"10.9.0.2": "n2"})] == [("n2",)]


async def test_the_hub_knows_from_where_agents_call() -> None:
    hub = Hub("secret", time.monotonic)
    port = await hub.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await greet(reader, writer, "secret", "n1", 1)
        while not hub.alive(60):
            await asyncio.sleep(0.01)
        assert hub._address_of == {"n1": "127.0.0.1"}
        assert hub.addresses() == {}, "a loopback address tells no nodes apart"
        writer.close()
    finally:
        await hub.close()


def test_a_clock_that_is_set_forward_is_no_standing_still(tmp_path: Path) -> None:
    now = [0.0]
    progress = Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60)
    made = LogWatch(tmp_path, SPEC, ("n1", "n2"), progress, lambda: now[0])
    (tmp_path / "rank-00000.log").write_text("step 1\n")
    made.poll(1000.0)
    made.poll(1000.0 + 7200.0)
    assert made.stalled() is None
    now[0] = 61.0
    stall = made.stalled()
    assert stall is not None
    assert (stall.seconds, stall.step) == (61.0, 1)


def test_a_process_that_was_stopped_gives_what_it_waits_for_its_time_back(tmp_path: Path) -> None:
    """As by ``scontrol suspend``: ranks, agents and the launcher stood still together."""
    now = [100.0]
    awake = Awake(lambda: now[0])
    progress = Progress(DEFAULT_PATTERN, now=awake(), floor_s=60, first_s=60)
    made = LogWatch(tmp_path, SPEC, ("n1", "n2"), progress, awake)
    now[0] += 3600.0
    assert made.stalled() is None
    for _ in range(70):
        now[0] += 1.0
        awake()
    stall = made.stalled()
    assert stall is not None
    assert stall.seconds == 70.0
