"""What every SlurmClient promises: one suite over both clients of a real Slurm and over the Slurm in memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from pyslurm_python import require_pyslurm
from transom_slurm.batch import job_options
from transom_slurm.client import SlurmClient
from transom_slurm.commands import CommandClient
from transom_slurm.errors import SlurmRejected, SlurmUnavailable, SubmitAmbiguous
from transom_slurm.fake import FakeSlurm
from transom_slurm.pyslurm_client import PyslurmClient
from transom_slurm.pyslurm_process import worker_argv
from transom_slurm.runner import clean_env, user_identity
from transom_slurm.sandbox import Sandbox
from transom_slurm.states import DrainRecord, ReasonSource, drain_is_own, reason_source
from transom_slurm.types import ExitStatus, JobBase, SlurmJob, SubmitRequest

NODES = ("n1", "n2", "n3", "n4")
ENOUGH_S = 60.0


class World(Protocol):
    """A Slurm of four nodes, and what people do to it without going through a client."""

    client: SlurmClient

    def script(self, name: str) -> str: ...
    def end(self, job: SlurmJob, code: int) -> None: ...
    def drain(self, node: str, reason: str) -> None: ...
    def resume(self, node: str) -> None: ...
    def set_down(self, node: str, reason: str) -> None: ...
    def reserve(self, name: str, node: str) -> None: ...
    def outage(self) -> None: ...
    def recover(self) -> None: ...
    async def tick(self) -> bool: ...


class InMemory:
    def __init__(self) -> None:
        self.fake = FakeSlurm(4, user="root")
        self.client: SlurmClient = self.fake
        self._ticks = 0

    def script(self, name: str) -> str:
        return "#!/bin/sh\n"

    def end(self, job: SlurmJob, code: int) -> None:
        self.fake.finish(job.job_id, code)

    def drain(self, node: str, reason: str) -> None:
        self.fake.drain_by_person(node, reason, user="root")

    def resume(self, node: str) -> None:
        self.fake.resume_by_person(node)

    def set_down(self, node: str, reason: str) -> None:
        self.fake.set_down(node, reason)

    def reserve(self, name: str, node: str) -> None:
        self.fake.reserve(name, [node], maintenance=True)

    def outage(self) -> None:
        self.fake.outage(3600)

    def recover(self) -> None:
        self.fake.advance(3601)

    async def tick(self) -> bool:
        self.fake.advance(1)
        self._ticks += 1
        return self._ticks < ENOUGH_S


class Real:
    """A job's script waits until its exit code is written into a file of its name."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.client: SlurmClient = CommandClient(env=clean_env(sandbox.env()))
        self._until = time.monotonic() + ENOUGH_S
        self._reservations: list[str] = []
        self._down = False

    def script(self, name: str) -> str:
        path = self.folder / name
        return f"#!/bin/sh\nwhile [ ! -s '{path}' ]; do sleep 0.05; done\nexit $(cat '{path}')\n"

    def end(self, job: SlurmJob, code: int) -> None:
        (self.folder / job.name).write_text(str(code))

    def drain(self, node: str, reason: str) -> None:
        self._scontrol("update", f"nodename={node}", "state=drain", f"reason={reason}")

    def resume(self, node: str) -> None:
        self._scontrol("update", f"nodename={node}", "state=resume")

    def set_down(self, node: str, reason: str) -> None:
        self._scontrol("update", f"nodename={node}", "state=down", f"reason={reason}")

    def reserve(self, name: str, node: str) -> None:
        words = ("starttime=now", "duration=60", "flags=maint,ignore_jobs", f"nodes={node}", "users=root")
        self._scontrol("create", "reservation", f"reservationname={name}", *words)
        self._reservations.append(name)

    def outage(self) -> None:
        self._down = True
        self.sandbox.stop_controller()

    def recover(self) -> None:
        self.sandbox.start_controller()
        self._down = False

    async def tick(self) -> bool:
        await asyncio.sleep(0.1)
        return time.monotonic() < self._until

    def close(self) -> None:
        if self._down:
            self.recover()
        for name in self._reservations:
            self._scontrol("delete", f"reservationname={name}")
        self.sandbox.reset()

    def _scontrol(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.sandbox.run(["scontrol", *words])


class WithPyslurm(Real):
    """The same Slurm asked through pyslurm; a test in which the commands had to take its place fails."""

    def __init__(self, sandbox: Sandbox, folder: Path, python: str) -> None:
        super().__init__(sandbox, folder)
        env = clean_env(sandbox.env())
        self.client = PyslurmClient(CommandClient(env=env), argv=sandbox.hub_argv(worker_argv(python)), env=env)


@pytest.fixture(params=["fake", *(pytest.param(name, marks=pytest.mark.cluster) for name in ("commands", "pyslurm"))])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "fake":
        yield InMemory()
        return
    python = require_pyslurm() if request.param == "pyslurm" else ""
    sandbox = request.getfixturevalue("sandbox")
    real = WithPyslurm(sandbox, tmp_path, python) if python else Real(sandbox, tmp_path)
    yield real
    real.close()


@pytest.fixture
async def client(world: World) -> AsyncIterator[SlurmClient]:
    yield world.client
    if isinstance(world.client, PyslurmClient):
        await world.client.close()
        assert world.client.why.endswith("runs here")


def _request(world: World, name: str, nodes: int = 2, **wishes: object) -> SubmitRequest:
    options = job_options(nodes=nodes, output="/dev/null", **wishes)  # type: ignore[arg-type]
    return SubmitRequest(world.script(name), options, name, f"transom:{name}", "/tmp")


async def _when(world: World, true: Callable[[], Awaitable[object]]) -> None:
    while not await true():
        assert await world.tick(), "it never came true"


async def _job(world: World, job_id: int, true: Callable[[SlurmJob], bool]) -> SlurmJob:
    """The job once something is true of it."""
    seen: list[SlurmJob] = []

    async def check() -> bool:
        seen.append((await world.client.jobs())[job_id])
        return true(seen[-1])

    await _when(world, check)
    return seen[-1]


def _running(job: SlurmJob) -> bool:
    return job.status.base is JobBase.RUNNING and not job.status.flags


def _ended(job: SlurmJob) -> bool:
    return job.ended


async def test_nodes_are_all_there_and_idle(client: SlurmClient) -> None:
    nodes = await client.nodes()
    assert tuple(nodes) == NODES
    for name, node in nodes.items():
        assert (node.name, node.status.base, node.status.flags, node.state_text) == (name, "IDLE", frozenset(), "IDLE")
        assert (node.reason, node.reason_user, node.reason_time) == ("", "", None)
        assert node.partitions
        assert node.address
        assert node.boot_time
        assert node.status.responding
        assert not node.status.reserved_for_people


async def test_a_jobs_life(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "life", 2, time_limit="1:00:00"))
    waiting = (await client.jobs())[job_id]
    assert (waiting.name, waiting.comment, waiting.user, waiting.work_dir) == ("life", "transom:life", "root", "/tmp")
    assert (waiting.time_limit_s, waiting.may_requeue, waiting.restarts) == (3600, False, 0)
    assert waiting.submit_time
    job = await _job(world, job_id, _running)
    assert len(job.nodes) == 2
    assert job.batch_host == job.nodes[0]
    assert job.submit_time == waiting.submit_time
    assert job.start_time
    assert job.start_time >= waiting.submit_time
    assert job.end_time is job.exit is None
    assert not job.status.terminal
    assert not job.ended
    nodes = await client.nodes()
    assert {name for name in NODES if nodes[name].status.base == "ALLOCATED"} == set(job.nodes)
    assert f"{job_id}.batch" in [step.step_id for step in await client.steps(job_id)]
    world.end(job, 3)
    job = await _job(world, job_id, _ended)
    assert (job.status.base, job.status.terminal, job.exit) == (JobBase.FAILED, True, ExitStatus(3))
    assert job.reason == "NonZeroExitCode"
    assert job.end_time
    assert job.start_time
    assert job.end_time >= job.start_time
    assert list(await client.steps(job_id)) == []


async def test_success(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "fine"))
    world.end(await _job(world, job_id, _running), 0)
    job = await _job(world, job_id, _ended)
    assert (job.status.base, job.exit, job.derived_exit) == (JobBase.COMPLETED, ExitStatus(0), ExitStatus(0))


async def test_cancel_running_waiting_gone_and_unknown_jobs(world: World, client: SlurmClient) -> None:
    running = await client.submit(_request(world, "all", 4))
    await _job(world, running, _running)
    waiting = await client.submit(_request(world, "behind", 1))
    assert (await _job(world, waiting, lambda job: job.reason != "")).status.base is JobBase.PENDING
    for job_id in (waiting, running):
        await client.cancel(job_id)
        job = await _job(world, job_id, _ended)
        assert job.status.base is JobBase.CANCELLED
        await client.cancel(job_id)
    await client.cancel(987654)


async def test_a_waiting_job_has_no_nodes_and_says_why(world: World, client: SlurmClient) -> None:
    await _job(world, await client.submit(_request(world, "first", 3)), _running)
    job_id = await client.submit(_request(world, "second", 2))
    job = await _job(world, job_id, lambda job: job.reason in ("Resources", "Priority"))
    assert (job.status.base, job.nodes, job.batch_host) == (JobBase.PENDING, (), "")
    assert job.start_time is job.end_time is job.exit is None


async def test_excluded_nodes_are_left_out(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "without", 2, exclude=["n2", "n1"]))
    assert (await _job(world, job_id, _running)).nodes == ("n3", "n4")


async def test_find_by_exact_name(world: World, client: SlurmClient) -> None:
    own = type(world).__name__  # slurmctld remembers the jobs of another client's test
    names = [own + name for name in ("-1-1", "-1-10", "-a,b", "-1-1")]
    ids = [await client.submit(_request(world, name, 4)) for name in names]
    assert sorted(job.job_id for job in await client.find(names[0])) == [ids[0], ids[3]]
    assert [job.job_id for job in await client.find(names[2])] == [ids[2]]
    assert list(await client.find(own + "-1")) == []
    await client.cancel(ids[0])
    await _job(world, ids[0], _ended)
    assert len(await client.find(names[0])) == 2, "ended jobs are found too"


@pytest.mark.parametrize("text", ["a|b;c$(id)", "new\nJobId=1 JobState=FAILED", "tab\tbed", "quo\"te's %j", "ünï~"])
async def test_hostile_names_come_back_as_they_are(world: World, client: SlurmClient, text: str) -> None:
    text += type(world).__name__  # slurmctld remembers that of another client's test
    options = job_options(nodes=4, output="/dev/null", user_options=["--hold"])
    request = SubmitRequest(world.script("hostile"), options, text, f"transom:{text}", "/tmp")
    job_id = await client.submit(request)
    job = (await client.jobs())[job_id]
    assert (job.name, job.comment) == (text, f"transom:{text}")
    assert [found.job_id for found in await client.find(text)] == [job_id]


async def test_comment_a_node(world: World, client: SlurmClient) -> None:
    text = "transom[disk] /: 1% free, 'quoted' and \"so\""
    await client.comment_node("n2", text)
    node = (await client.nodes())["n2"]
    assert (node.comment, node.reason, node.status.drain) == (text, "", False)
    await client.comment_node("n2", "")
    assert (await client.nodes())["n2"].comment == ""
    with pytest.raises(SlurmRejected):
        await client.comment_node("no-such-node", "x")


async def test_drain_and_resume(world: World, client: SlurmClient) -> None:
    reason = "transom[xid] Xid 79 State=IDLE Comment=x job=7 ev=1"
    await client.drain("n3", reason)
    node = (await client.nodes())["n3"]
    assert (node.status.base, node.status.drained, node.reason, node.reason_user) == ("IDLE", True, reason, "root")
    assert node.status.reserved_for_people
    assert node.reason_time
    assert drain_is_own(node, DrainRecord(node.reason, node.reason_user, node.reason_time))
    await client.resume("n3")
    node = (await client.nodes())["n3"]
    assert not node.status.drain
    assert node.reason in ("", reason), "22.05 takes the reason out; 24.11 leaves it, and may leave it when asked to"

    # It must register anew; a real slurmd may have done so by the time that we ask.
    assert isinstance(world, Real) or (node.status.responding, node.boot_time) == (False, None)

    async def registered() -> bool:
        node = (await client.nodes())["n3"]
        return node.status.flags == frozenset() and node.boot_time is not None

    await _when(world, registered)


async def test_a_drain_leaves_the_running_job_alone(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "goes-on", 4))
    await _job(world, job_id, _running)
    await client.drain("n2", "transom[xid] x")
    node = (await client.nodes())["n2"]
    assert (node.status.drain, node.status.drained) == (True, False)
    job = await _job(world, job_id, _running)
    assert "n2" in job.nodes
    world.end(job, 0)
    assert (await _job(world, job_id, _ended)).status.base is JobBase.COMPLETED

    async def drained() -> bool:
        return (await client.nodes())["n2"].status.drained

    await _when(world, drained)


async def test_a_persons_edit_takes_the_drain_from_us(world: World, client: SlurmClient) -> None:
    await client.drain("n1", "transom[xid] x")
    ours = (await client.nodes())["n1"]
    assert ours.reason_time
    record = DrainRecord(ours.reason, ours.reason_user, ours.reason_time)
    world.drain("n1", "RMA 4711, call Bob")
    theirs = (await client.nodes())["n1"]
    assert theirs.status.drain
    assert reason_source(theirs.reason) is ReasonSource.PERSON
    assert not drain_is_own(theirs, record)


async def test_a_node_that_a_person_set_down(world: World, client: SlurmClient) -> None:
    world.set_down("n4", "kicked the plug")
    node = (await client.nodes())["n4"]
    assert (node.status.base, node.reason, node.reason_user) == ("DOWN", "kicked the plug", "root")
    assert not node.status.responding
    await client.resume("n4")
    assert (await client.nodes())["n4"].status.base == "DOWN", "lifting a drain does not bring a DOWN node back"
    await client.resume("n4", down=True)

    async def idle() -> bool:
        return (await client.nodes())["n4"].status.base == "IDLE"

    await _when(world, idle)


async def test_a_job_outlives_a_lost_node_and_the_loss_of_its_batch_host(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "outlives", 3))
    job = await _job(world, job_id, _running)
    last, rest = job.nodes[-1], job.nodes[:-1]
    world.set_down(last, "lost")
    job = await _job(world, job_id, lambda job: last not in job.nodes)
    assert (job.status.base, job.nodes) == (JobBase.RUNNING, rest)


async def test_a_job_of_one_node_dies_with_it(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "dies", 1))
    job = await _job(world, job_id, _running)
    world.set_down(job.nodes[0], "lost")
    job = await _job(world, job_id, _ended)
    # Its exit status says nothing: as the script took its SIGTERM, 0:0 if slurmctld heard no more, 0:1 from 24.11.
    assert (job.status.base, job.reason) == (JobBase.NODE_FAIL, "NodeDown")


async def test_update_job(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "updated", 3, time_limit="30"))
    await client.update_job(job_id, {"Comment": "new = comment", "TimeLimit": "1:00:00"})
    job = await _job(world, job_id, _running)
    assert (job.comment, job.time_limit_s) == ("new = comment", 3600)
    keep = (job.nodes[0], job.nodes[2])
    await client.update_job(job_id, {"NodeList": ",".join(keep)})
    assert (await _job(world, job_id, lambda job: len(job.nodes) == 2)).nodes == keep
    for wrong, fields in ((987654, {"Comment": "x"}), (job_id, {"Frobnicate": "x"}), (job_id, {"ExcNodeList": "n1"})):
        with pytest.raises(SlurmRejected):
            await client.update_job(wrong, fields)


async def test_what_slurm_rejects(world: World, client: SlurmClient) -> None:
    for wishes in ({"partition": "no-such"}, {"exclude": ["no-such"]}, {"time_limit": "soon"}):
        with pytest.raises(SlurmRejected):
            await client.submit(_request(world, "never", 1, **wishes))
    assert list(await client.find("never")) == []
    for act in (client.drain("no-such", "transom[x] y"), client.resume("no-such")):
        with pytest.raises(SlurmRejected, match=r"(?i)invalid node"):
            await act


async def test_a_maintenance_is_seen_on_the_node_and_in_the_list(world: World, client: SlurmClient) -> None:
    assert list(await client.reservations()) == []
    world.reserve("mnt", "n4")
    (found,) = await client.reservations()
    assert (found.name, found.nodes) == ("mnt", ("n4",))
    assert "MAINT" in found.flags
    assert found.start

    async def flagged() -> bool:
        return (await client.nodes())["n4"].status.reserved_for_people

    await _when(world, flagged)


async def test_an_outage_is_unknown_and_afterwards_nothing_is_lost(world: World, client: SlurmClient) -> None:
    job_id = await client.submit(_request(world, "stays", 2))
    before = await _job(world, job_id, _running)
    world.outage()
    asked = (client.jobs(), client.nodes(), client.drain("n1", "transom[x] y"), client.cancel(job_id))
    for verdict in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(verdict, SlurmUnavailable)
    with pytest.raises(SubmitAmbiguous):
        await client.submit(_request(world, "maybe", 1))
    world.recover()
    after = await _job(world, job_id, _running)
    assert (after.name, after.submit_time, after.nodes) == (before.name, before.submit_time, before.nodes)
    assert list(await client.find("maybe")) == []
    assert not (await client.nodes())["n1"].status.drain


async def test_the_rest_is_there(client: SlurmClient) -> None:
    config = await client.config()
    assert config["SLURM_VERSION"].count(".") == 2
    assert "sec" in config["SlurmdTimeout"]
    assert isinstance(await client.topology(), dict)
    assert await client.finished([987654], 0) == {}
    assert list(await client.steps(987654)) == []


_AS_NOBODY = """
import asyncio, json, sys
from transom_slurm.commands import CommandClient
from transom_slurm.errors import SlurmError
from transom_slurm.runner import user_identity
from transom_slurm.types import SubmitRequest

async def main(folder, secret):
    nobody, client = user_identity("nobody"), CommandClient()
    said = "id -u; id -G; pwd; echo $GREETING; env | grep -c ^SLURM_TIME_FORMAT; true"
    script = f"#!/bin/sh\\n({said}) > {folder}/said\\n"
    env = {"GREETING": "hello", "SLURM_TIME_FORMAT": "x"}
    options = ("--output=/dev/null",)
    job_id = await client.submit(SubmitRequest(script, options, "theirs", "c", folder, user=nobody, env=env))
    try:
        await client.submit(SubmitRequest(script, options, "theirs", "c", secret, user=nobody))
        refused = ""
    except SlurmError as error:
        refused = f"{type(error).__name__}: {error}"
    print(json.dumps([job_id, refused]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.cluster
async def test_a_job_is_submitted_with_its_users_rights_and_environment(sandbox: Sandbox, tmp_path: Path) -> None:
    nobody = user_identity("nobody")
    folder, secret = Path("/var/tmp") / tmp_path.name, tmp_path / "secret"
    folder.mkdir(mode=0o777)
    secret.mkdir(mode=0o700)
    try:
        folder.chmod(0o777)
        done = sandbox.run([sys.executable, "-c", _AS_NOBODY, str(folder), str(secret)])
        job_id, refused = json.loads(done.stdout)
        real = Real(sandbox, tmp_path)
        job = await _job(real, job_id, _ended)
        assert (job.user, job.status.base) == ("nobody", JobBase.COMPLETED)
        uid, groups, where, greeting, leaked = (folder / "said").read_text().splitlines()
        assert (uid, where, greeting, leaked) == (str(nobody.uid), str(folder), "hello", "0")
        assert groups.split() == [str(group) for group in nobody.groups]
        assert "SlurmRejected" in refused
        assert "Permission denied" in refused
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
        sandbox.reset()
