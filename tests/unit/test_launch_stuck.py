"""Which ranks cannot go on is told by two looks at real processes; one at rest for a moment is not among them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from transom_slurm.sandbox import processes
from transom_slurm.sandbox.waiting import until

from transomd.launch.agents import Agents
from transomd.launch.hub import AgentGone
from transomd.launch.ranks import find_ranks
from transomd.launch.runs import AGAIN_S
from transomd.launch.stuck import Stuck

EPOCH = 3
SPAWN = """
import os, sys, time
while True:
    open_it = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0o600)]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=open_it), 0)
"""
"""Waits in the kernel, in state D, until its child has opened the file: nobody writes to that fifo at first."""

Start = Callable[..., "subprocess.Popen[bytes]"]


class Node:
    """Stands for the agents: one node is asked for its real processes; what is ``silent`` does not answer."""

    def __init__(self, job: int) -> None:
        self.job = job
        self.hub = self
        self.silent: set[str] = set()
        self.asked: list[list[str]] = []

    def alive(self) -> list[str]:
        return ["n1", "n2"]

    async def ask_all(self, nodes: Iterable[str], what: str, timeout_s: float) -> dict[str, Any]:
        assert what == "ranks"
        self.asked.append(list(nodes))
        found = [one.to_json() for one in find_ranks(self.job)]
        return {
            node: AgentGone(node) if node in self.silent else found if node == "n1" else [] for node in self.asked[-1]
        }


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program as a rank of this test's own job."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, rank: int | None = 0, epoch: int = EPOCH, **more: str) -> subprocess.Popen[bytes]:
        names = {"TRANSOM_JOB_ID": str(os.getpid()), "TRANSOM_EPOCH": str(epoch), **more}
        outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
        env = {**outer, **names, **({} if rank is None else {"RANK": str(rank)})}
        made.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        return made[-1]

    yield begin
    for one in made:
        os.killpg(one.pid, 9)
        one.wait()


@pytest.fixture
def node() -> Node:
    return Node(os.getpid())


def looker(node: Node) -> Stuck:
    """One whose looks are a minute apart."""
    return Stuck(cast(Agents, node), itertools.count(0, 60).__next__)


async def test_a_stopped_rank_is_told_by_the_second_look_and_one_that_sleeps_cannot_be_mistaken(
    start: Start, node: Node
) -> None:
    stopped, sleeps = start("sleep", "600", rank=1), start("sleep", "600", rank=2)
    assert until(lambda: processes.name(stopped.pid) == processes.name(sleeps.pid) == "sleep", 30)
    processes.stop([stopped.pid], 30)
    look = looker(node)
    assert await look.look(EPOCH, ["n1"]) == []
    found = {one.rank: (one.pid, one.state) for one in await look.look(EPOCH, ["n1"])}
    assert found[1] == (stopped.pid, "T")
    assert found.get(2, (0, "S"))[1] == "S"


async def test_a_rank_that_has_run_between_two_looks_is_not_stuck(start: Start, node: Node) -> None:
    rank = start("sleep", "600")
    assert until(lambda: processes.name(rank.pid) == "sleep", 30)
    look = looker(node)
    processes.stop([rank.pid], 30)
    assert await look.look(EPOCH, ["n1"]) == []
    processes.signal_each([rank.pid], processes.signal.SIGCONT)
    assert until(lambda: processes.state(rank.pid) == "S", 30)
    processes.stop([rank.pid], 30)
    assert await look.look(EPOCH, ["n1"]) == []
    assert [one.state for one in await look.look(EPOCH, ["n1"])] == ["T"]


async def test_a_wait_in_the_kernel_counts_only_where_it_is_the_same_one(
    start: Start, node: Node, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    rank = start(sys.executable, "-c", SPAWN, str(fifo))
    look = looker(node)
    assert until(lambda: len(processes.descendants([rank.pid])) == 2 and processes.state(rank.pid) == "D", 30)

    async def stuck() -> list[str]:
        return [one.state for one in await look.look(EPOCH, ["n1"]) if one.pid == rank.pid]

    def switches() -> int:
        return {one.pid: one.switches for one in find_ranks(node.job)}[rank.pid]

    assert await stuck() == []
    assert await stuck() == ["D"]
    before = switches()
    os.close(os.open(fifo, os.O_WRONLY))  # as where a disk answers: on to the next wait
    assert until(lambda: switches() > before and processes.state(rank.pid) == "D", 30)
    assert await stuck() == []


async def test_a_silent_agent_says_nothing_and_one_that_is_lost_is_not_asked(start: Start, node: Node) -> None:
    rank = start("sleep", "600")
    assert until(lambda: processes.name(rank.pid) == "sleep", 30)
    processes.stop([rank.pid], 30)
    look = looker(node)
    node.silent = {"n1"}
    assert await look.look(EPOCH, ["n1", "n2", "n9"]) == []
    assert node.asked == [["n1", "n2"]]
    node.silent = set()
    assert await look.look(EPOCH, ["n1"]) == [], "the first word of that agent"
    assert len(await look.look(EPOCH, ["n1"])) == 1


async def test_a_rank_that_a_script_starts_by_srun_alone_has_the_number_of_its_task(start: Start, node: Node) -> None:
    made = [start("sleep", "600", rank=None, SLURM_PROCID="7"), start("sleep", "600", rank=2, SLURM_PROCID="1")]
    assert until(lambda: all(processes.name(one.pid) == "sleep" for one in made), 30)
    processes.stop([one.pid for one in made], 30)
    look = looker(node)
    await look.look(EPOCH, ["n1"])
    assert sorted(one.rank for one in await look.look(EPOCH, ["n1"])) == [2, 7]


async def test_what_is_left_of_an_earlier_launch_or_is_no_rank_is_not_told(start: Start, node: Node) -> None:
    others = [start("sleep", "600", epoch=EPOCH - 1), start("sleep", "600", rank=None)]
    assert until(lambda: all(processes.name(one.pid) == "sleep" for one in others), 30)
    processes.stop([one.pid for one in others], 30)
    look = looker(node)
    assert [await look.look(EPOCH, ["n1"]) for _ in range(2)] == [[], []]


async def test_two_looks_at_one_moment_tell_no_more_than_one(start: Start, node: Node) -> None:
    rank, clock = start("sleep", "600"), [100.0]
    assert until(lambda: processes.name(rank.pid) == "sleep", 30)
    processes.stop([rank.pid], 30)
    look = Stuck(cast(Agents, node), lambda: clock[0])
    await look.look(EPOCH, ["n1"])
    clock[0] += 0.1
    assert await look.look(EPOCH, ["n1"]) == []
    clock[0] += AGAIN_S
    assert len(await look.look(EPOCH, ["n1"])) == 1
