"""A program has ended well; what it saved last, and only a keeper has, comes to storage before the job is done."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tce_keepers import keepers, own_place

from transomd.api.wire import LauncherReport, LaunchReport
from transomd.launch import storing
from transomd.launch.agent import Agent
from transomd.launch.agents import Agents
from transomd.launch.hub import AgentGone
from transomd.launch.launcher import Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.rundir import COMPLETED, RunDir
from transomd.launch.storing import LostError, Storing
from transomd.spec import JobSpec
from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints
from transomd.words import LauncherPhase


class Node:
    """A node whose agent and keeper are real; the line to them is not. Stands for ``Agents``."""

    def __init__(self, folder: Path) -> None:
        run_dir = RunDir(folder)
        run_dir.write_json(folder / "spec.json", {"checkpoint": {}})
        run_dir.token_file.write_text("secret")
        self.agent = Agent(run_dir, 1, "n1", 0.1)
        self.hub = self

    async def ask_all(self, nodes: Iterable[str], what: str, timeout_s: float) -> dict[str, Any]:
        return {node: await self.agent._do({"what": what}) for node in nodes}


@pytest.fixture
async def directory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Path, Node]]:
    """Where a program saves, whose node has an agent."""
    with own_place(killed=True) as folder:
        (folder.parent / "run").mkdir()
        node = Node(folder.parent / "run")
        keeping = node.agent._keeping
        monkeypatch.setattr(keeping, "path", folder.parent / "keeper.sock")
        monkeypatch.setenv("TRANSOM_AGENT", str(keeping.path))
        keeping.start()
        while not keeping.path.exists():
            await asyncio.sleep(0.01)
        yield folder, node
        await keeping.end()


def refuses(directory: Path) -> Path:
    """From now on the store refuses every write; how it was comes back by ``rename`` to ``directory``."""
    aside = directory.with_name("aside")
    directory.rename(aside)
    directory.write_text("this is no directory")
    return aside


def leave(directory: Path, node: Node) -> Storing:
    """Save a step that storage refuses, and end without a word, as who waits for nothing."""
    engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1)
    engine.save(1, {"x": torch.zeros(10)}).wait(timeout=60)
    refuses(directory)
    engine.save(2, {"x": torch.ones(10)})
    engine._close(0, leave=False)
    return Storing(cast(Agents, node), ["n1"], lambda: 0.0)


async def looked(left: Storing) -> None:
    """Look until nothing is waited for."""
    while not await left.look():
        await asyncio.sleep(0.01)


async def test_what_storage_refuses_at_the_end_is_waited_for_and_told(directory: tuple[Path, Node]) -> None:
    folder, _ = directory
    left = leave(*directory)
    while "Not a directory" not in left.told:
        assert not await left.look()
    assert "the program has ended; what it saved last is being stored by n1 (rank 0 on n1:" in left.told
    folder.unlink()
    folder.with_name("aside").rename(folder)
    await looked(left)
    assert left.told == ""
    assert [found.step for found in list_checkpoints(folder) if found.complete] == [2, 1]


async def test_a_keeper_that_is_lost_with_it_is_no_good_end(directory: tuple[Path, Node]) -> None:
    folder, _ = directory
    left = leave(*directory)
    assert not await left.look()
    (pid,) = keepers(folder.parent)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostError, match="what rank 0 saved last was not stored yet on n1: its keeper was lost"):
        await looked(left)


async def test_a_keeper_that_was_given_nothing_is_not_waited_for(directory: tuple[Path, Node]) -> None:
    left = Storing(cast(Agents, directory[1]), ["n1"], lambda: 0.0)
    await looked(left)
    assert left.told == ""


def answers(*each: Any, lost: tuple[str, ...] = ()) -> Agents:
    """Agents of one node that answer this, one after another."""
    said = iter(each)

    async def ask_all(nodes: Iterable[str], what: str, timeout_s: float) -> dict[str, Any]:
        return {node: next(said) for node in nodes}

    found = SimpleNamespace(hub=SimpleNamespace(ask_all=ask_all), lost=lambda nodes: [n for n in nodes if n in lost])
    return cast(Agents, found)


def told(unstored: list[int], problem: str = "", stored: int = 1) -> dict[str, Any]:
    stages = {"memory": {"step": 2, "epoch": 1}, "storage": {"step": stored, "epoch": 1}}
    return {"there": True, "pid": 7, "unstored": unstored, "ranks": [{"rank": 0, "stages": stages, "problem": problem}]}


async def test_what_is_given_up_is_told_with_its_reason() -> None:
    left = Storing(answers(told([0], "no space"), told([], "no space")), ["n1"], lambda: 0.0)
    assert not await left.look()
    assert await left.look()
    assert left.told == "step 2, which rank 0 on n1 saved last, is not in storage: no space"


async def test_a_store_that_hangs_is_not_waited_for_without_end() -> None:
    now = [0.0]
    left = Storing(answers(*[told([0])] * 2), ["n1"], lambda: now[0])
    assert not await left.look()
    now[0] = storing.LONGEST_S + 1
    assert await left.look()
    assert left.told == "step 2, which rank 0 on n1 saved last, is not in storage"


async def test_a_node_that_is_lost_with_it_is_no_good_end_but_silence_is_unknown() -> None:
    gone = AgentGone("no answer")
    assert not await Storing(answers(gone), ["n1"], lambda: 0.0).look()
    assert await Storing(answers(gone, lost=("n1",)), ["n1"], lambda: 0.0).look(), "it may have had nothing"
    left = Storing(answers(told([0]), gone, lost=("n1",)), ["n1"], lambda: 0.0)
    assert not await left.look()
    with pytest.raises(LostError, match="it stopped answering"):
        await left.look()


async def test_agents_of_an_earlier_version_and_keepers_that_are_slow() -> None:
    assert await Storing(answers(ValueError("unknown request 'unstored'")), ["n1"], lambda: 0.0).look()
    left = Storing(answers({"there": True}, told([], stored=2)), ["n1"], lambda: 0.0)
    assert not await left.look()
    assert await left.look()
    assert left.told == ""


class Ended:
    """Stands for a program, and for what is read of its logs: it has ended with exit code 0."""

    rc, left, step, trouble = 0, "", None, ""

    def __init__(self) -> None:
        self.logs = self

    async def finish(self) -> bool:
        return True

    async def stop(self) -> None: ...


class Daemon:
    """Stands for the line to a daemon that has nothing to say."""

    async def report(self, report: LauncherReport) -> None: ...

    def silent_for(self) -> float:
        return 0.0


async def test_the_job_is_done_only_then_also_where_slurm_wants_its_allocation_back(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    options = Options(
        run_dir=RunDir(tmp_path), job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1",), host="n1"
    )
    spec = JobSpec(name="t", command="true", nodes=1, tasks_per_node=1, workdir="/")
    launcher = Launcher(options, cast(Any, Daemon()), spec, Watch())
    launcher.course.begin(LaunchReport(epoch=1, nodes=["n1"], started_at=1.0), None)
    launcher.runs._program = launcher.runs._reading = cast(Any, Ended())
    launcher.agents.hub.ask_all = answers(told([0]), told([0], "no space"), told([])).hub.ask_all  # type: ignore[method-assign]
    assert await launcher._tick() is None
    launcher.stop_by_signal("SIGTERM")
    assert await launcher._tick() is None
    assert "is being stored by n1 (rank 0 on n1: no space)" in launcher._report().message
    assert launcher.course.running
    assert not launcher.options.run_dir.claimed(COMPLETED)
    assert await launcher._tick() is None
    assert launcher.course.phase is LauncherPhase.DONE
    assert launcher.options.run_dir.claimed(COMPLETED)
    assert launcher._report().message == "step 2, which rank 0 on n1 saved last, is not in storage"
