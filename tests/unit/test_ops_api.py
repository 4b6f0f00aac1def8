"""The API for administrators: how often it reads the database, why a node was drained or not, who is a lemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tol_world import SimWorld, quick_settings
from transom_sql.records import Event, Incident, Intent, Job, Launch
from transom_sql.store import Change, Latest

from transomd.api.client import Client
from transomd.api.history import lemons
from transomd.api.incidents import incident_detail
from transomd.api.server import Api
from transomd.api.views import job_line
from transomd.settings import Settings
from transomd.tol.watchers import Watcher
from transomd.words import JobState

NOW = 1_800_000_000.0


class Counter(Watcher):
    """Counts calls of the store."""

    def __init__(self) -> None:
        self.calls = 0

    def stored(self, seconds: float, ok: bool) -> None:
        self.calls += 1


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    made = SimWorld(3, settings=quick_settings())
    await made.start_daemon()
    yield made
    await made.close()


@pytest.fixture
async def client(world: SimWorld, tmp_path: Path) -> AsyncIterator[Client]:
    assert world.operator is not None
    hands: Any = None
    api = Api(world.operator, hands, world.settings, world.slurm.clock)
    runner = web.AppRunner(api.app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    yield Client(str(tmp_path / "s"))
    await runner.cleanup()


def some_jobs(world: SimWorld, count: int, state: JobState) -> None:
    for _ in range(count):
        job = Job(
            name="demo", user="root", uid=0, spec={"workdir": "/w", "checkpoint": {"dir": "/c"}}, run_dir="/r", cwd="/",
            token_sha256="0" * 64, state=state.value, reason="", created_at=world.now, changed_at=world.now,
            finished_at=world.now if state.final else None,
        )  # fmt: skip
        stored = world.store.add_job(job)
        launch = Launch(job_id=stored.id, epoch=1, attempt=1, nodes=("n1",), started_at=world.now)
        incident = Incident(
            job_id=stored.id, attempt=1, epoch=1, detected_at=NOW, evidence=({"text": "x" * 1000},) * 50, nodes=("n1",)
        )
        world.store.commit(Change(attempts=[attempt(stored.id)], launches=[launch], incident=incident))


def attempt(job: int) -> Any:
    from transom_sql.records import Attempt

    return Attempt(job_id=job, number=1, tag=f"demo-{job}", created_at=NOW, nodes=("n1", "n2"))


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETED])
async def test_listing_reads_as_often_for_forty_jobs_as_for_two(
    world: SimWorld, client: Client, state: JobState
) -> None:
    assert world.operator is not None
    counts = []
    for more in (2, 38):
        some_jobs(world, more, state)
        world.operator.books._watcher = counter = Counter()
        told = await asyncio.to_thread(client.get, "/v1/jobs")
        counts.append(counter.calls)
    assert counts[0] == counts[1] <= 3
    assert len(told["jobs"]) == 40
    (first, *_) = told["jobs"]
    assert (first["nodes"], first["spares"], first["workdir"], first["checkpoint_dir"]) == (["n1"], ["n2"], "/w", "/c")
    assert first["incident"]["evidence"] == [], "a list of many jobs stays small"
    assert first["restarts"] == 0


async def test_nodes_that_are_still_being_checked_are_not_called_spare(world: SimWorld) -> None:
    some_jobs(world, 1, JobState.CHECKING)
    (job,) = world.store.jobs()
    told = job_line(job, Latest(attempt=attempt(job.id)))
    assert (told["nodes"], told["spares"]) == (["n1", "n2"], [])


async def test_nodes_are_told_as_they_were_while_slurm_is_silent(world: SimWorld, client: Client) -> None:
    """That is when a person looks."""
    assert world.operator is not None
    await world.run(10)
    known = await asyncio.to_thread(client.get, "/v1/nodes")
    assert known["slurm"] == {"ok": True, "at": known["slurm"]["at"], "error": ""}
    world.slurm.outage(500)
    await world.run(60)
    stale = await asyncio.to_thread(client.get, "/v1/nodes")
    assert not stale["slurm"]["ok"]
    assert stale["slurm"]["error"]
    assert world.now - stale["slurm"]["at"] > 50
    assert [(n["name"], n["state"], n["stale"]) for n in stale["nodes"]] == [(f"n{i}", "IDLE", True) for i in (1, 2, 3)]
    assert world.operator.world().slurm.nodes is None, "nothing is decided on it"


async def test_nodes_of_a_slurm_that_has_never_answered(client: Client) -> None:
    told = await asyncio.to_thread(client.get, "/v1/nodes")
    assert told == {"nodes": [], "slurm": {"ok": False, "at": None, "error": "not asked yet"}}


# --- one incident -------------------------------------------------------------------------------------------------


def an_incident(**fields: Any) -> Incident:
    known = {"id": 5, "job_id": 1, "attempt": 1, "epoch": 1, "detected_at": NOW, "blame": "node", "nodes": ("n1",)}
    return Incident(**{**known, **fields})


def why(incident: Incident, *, intents: Sequence[Intent] = (), events: Sequence[Event] = (), **site: Any) -> str:
    settings = Settings.model_validate(site)
    told = incident_detail(incident, [], intents, events, settings)
    return str(told["nodes"][0]["why"])


def drain(state: str, **outcome: Any) -> Intent:
    args = {"node": "n1", "reason": "transom[xid] XID 79"}
    return Intent(key="d", kind="drain", state=state, created_at=NOW, incident_id=5, args=args, outcome=outcome)


def test_why_a_node_is_drained_or_not() -> None:
    unconfirmed = an_incident(data={"await_drain": {"n1": ["xid"]}})
    refused = Event(at=NOW + 1, kind="drain-refused", node="n1", message="n1 is not drained: transom is paused by ann")
    assert why(an_incident(), intents=[drain("done")]) == "drained: transom[xid] XID 79"
    assert why(an_incident(), intents=[drain("failed", error="ann holds it")]) == "not drained: ann holds it"
    assert why(an_incident(), intents=[drain("pending")]) == "being drained; tried 0 times"
    assert why(unconfirmed, events=[refused]) == "not drained: transom is paused by ann"
    assert why(an_incident(blame="program")) == "not drained: blame is program, not a node"
    observed = "xid is in mode observe (health.modes in transomd.toml)"
    assert why(unconfirmed) == f"not drained: {observed}; for a lost node drain.node_loss is observe"
    assert why(an_incident(), drain={"node_loss": "drain"}) == (
        "not drained: the probe found nothing unfit, and Slurm did not call it lost"
    )


def test_only_what_happened_meanwhile_is_its_story() -> None:
    events = [Event(id=n, at=NOW + at, kind="k", message="m") for n, at in enumerate((-60, -1, 5, 500))]
    told = incident_detail(an_incident(closed_at=NOW + 60), [], [], events, Settings())
    assert [event["id"] for event in told["events"]] == [1, 2]


def test_lemons_are_nodes_blamed_more_than_once() -> None:
    found = lemons(
        [
            an_incident(id=1, nodes=("n1", "n2"), failure_class="host"),
            an_incident(id=2, nodes=("n1",), job_id=2, failure_class="gpu-memory", detected_at=NOW + 9),
            an_incident(id=3, nodes=("n3",), blame="network"),
            an_incident(id=4, nodes=("n3",), blame="unknown"),
        ]
    )
    assert found == [
        {"node": "n1", "incidents": 2, "jobs": 2, "classes": ["gpu-memory", "host"], "last": NOW + 9},
    ]
