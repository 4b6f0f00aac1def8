"""Real pyslurm on a real Slurm, where it could differ from the commands, and while Slurm's parts are ill."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import Site, check_end
from pyslurm_python import require_pyslurm
from transom_slurm.commands import CommandClient
from transom_slurm.errors import SlurmUnavailable
from transom_slurm.pyslurm_client import PyslurmClient, choose_client
from transom_slurm.pyslurm_process import worker_argv
from transom_slurm.runner import clean_env
from transom_slurm.sandbox import Sandbox, processes
from transom_slurm.types import ExitStatus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def python() -> str:
    return require_pyslurm()


@pytest.fixture
async def clients(sandbox: Sandbox, python: str) -> AsyncIterator[tuple[CommandClient, PyslurmClient]]:
    """Both clients of one Slurm; the second has a deadline of 2 s."""
    commands = CommandClient(env=clean_env(sandbox.env()))
    argv, env = sandbox.hub_argv(worker_argv(python)), clean_env(sandbox.env())
    client, why = await choose_client(commands, "pyslurm", argv=argv, env=env, deadline_s=2.0)
    assert isinstance(client, PyslurmClient)
    assert why.endswith("runs here")
    yield commands, client
    await client.close()
    sandbox.reset()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    processes.stop([pid])
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _settled(commands: CommandClient, before: Collection[int]) -> Collection[int]:
    """The new jobs, once each of them is as it will stay."""
    end = time.monotonic() + 30
    while True:
        new = {i: job.state_text for i, job in (await commands.jobs()).items() if i not in before}
        steps = [step for i in new for step in await commands.steps(i)]
        if sorted(new.values()) == ["COMPLETED", "FAILED", "FAILED", "PENDING", "RUNNING"] and len(steps) == 2:
            return new
        assert time.monotonic() < end, new
        await asyncio.sleep(0.1)


async def test_both_clients_say_the_same(sandbox: Sandbox, clients: tuple[CommandClient, PyslurmClient]) -> None:
    commands, client = clients
    before = set(await commands.jobs())
    undecodable = b"\xff\xfe".decode("utf-8", "surrogateescape")
    for words in (
        ["-J", "part", "-w", "n1", "--wrap", "srun -n1 sleep 300"],
        ["-J", "None", "-w", "n2", "--wrap", "exit 137"],
        ["-J", "signal", "-w", "n2", "--wrap", "kill -9 $$"],
        ["-J", "step", "-w", "n2", "--wrap", "srun sh -c 'exit 200'; exit 0"],
        ["-H", "-t", "1-12", "--comment", "None", "-J", undecodable, "--wrap", "true"],
    ):
        sandbox.run(["sbatch", "-n1", "-o", "/dev/null", *words])
    sandbox.run(["scontrol", "update", "nodename=n3", "state=drain", "reason=bad  thing, user x"])
    sandbox.run(["scontrol", "update", "nodename=n4", "comment=a comment"])
    told = await _settled(commands, before)
    assert await client.jobs() == await commands.jobs()
    assert await client.nodes() == await commands.nodes()
    assert {node.status.base for node in (await client.nodes()).values()} == {"MIXED", "IDLE"}
    for job_id in told:
        assert sorted(map(str, await client.steps(job_id))) == sorted(map(str, await commands.steps(job_id)))
    exits = {job.name: (job.exit, job.derived_exit) for i, job in (await client.jobs()).items() if i in told}
    assert exits["None"][0] == ExitStatus(137), "pyslurm says 9"
    assert exits["step"] == (ExitStatus(0), ExitStatus(200)), "pyslurm says 72"
    assert exits["part"] == exits[undecodable] == (None, None)
    assert client.why.endswith("runs here")


async def test_munge_that_hangs_is_a_deadline_and_not_the_end(
    sandbox: Sandbox, clients: tuple[CommandClient, PyslurmClient]
) -> None:
    _, client = clients
    turns = 0

    async def loop_goes_on() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(loop_goes_on())
    began = time.monotonic()
    with stopped(int((sandbox.directory / "run" / "munged.hub.pid").read_text())):
        pid = client.worker.pid
        with pytest.raises(SlurmUnavailable, match="no answer within 2 s"):
            await client.nodes()
    assert time.monotonic() - began < 8
    assert turns > 50
    assert not Path(f"/proc/{pid}").exists()
    assert len(await client.nodes()) == 4
    ticker.cancel()


async def test_a_silent_controller_is_unknown(sandbox: Sandbox, clients: tuple[CommandClient, PyslurmClient]) -> None:
    _, client = clients
    with stopped(int((sandbox.directory / "run" / "slurmctld.pid").read_text())), pytest.raises(SlurmUnavailable):
        await client.jobs()
    assert isinstance(await client.jobs(), dict)


async def test_a_worker_that_somebody_kills(clients: tuple[CommandClient, PyslurmClient]) -> None:
    _, client = clients
    assert client.worker.pid
    os.kill(client.worker.pid, signal.SIGKILL)
    with pytest.raises(SlurmUnavailable, match="killed by SIGKILL"):
        await client.jobs()
    assert len(await client.nodes()) == 4


async def test_with_a_slurm_conf_that_is_none_pyslurm_ends_its_process_and_not_ours(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "slurm.conf").write_text("nonsense\n")
    env = {**clean_env(), "SLURM_CONF": str(tmp_path / "slurm.conf")}
    commands = CommandClient(env=env)
    client, why = await choose_client(commands, argv=worker_argv(python), env=env)
    assert client is commands
    assert "ended with 1" in why
    assert "fatal" in why


@pytest.mark.timeout(240)
def test_a_job_is_brought_through_a_lost_node_by_a_daemon_that_asks_pyslurm(python: str, site: Site) -> None:
    site.stop_daemon()
    path = site.root / "transomd.toml"
    wish = f'[slurm]\nclient = "pyslurm"\npyslurm_python = "{python}"\n'
    path.write_text(path.read_text().replace("[slurm]\n", wish))
    site.start_daemon()
    job = site.submit("--then 20")
    site.wait_step(job, 7)
    site.sandbox.fail("n2", "power")
    check_end(site, job, drained={"n2"})
    log = (site.root / "transomd.log").read_text()
    assert "pyslurm 2" in log
    assert "Slurm's commands answer queries" not in log.rpartition("pyslurm 2")[2]
