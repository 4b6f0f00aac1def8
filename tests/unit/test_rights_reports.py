"""What a launcher reports is a user's word: it is read strictly, and can do no harm but to that user's own job."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tol_world import SimWorld
from transom_slurm.types import SlurmJob
from transom_sql.records import Job

from transomd.api import checked
from transomd.api.wire import FailureReport, LauncherReport, LaunchReport
from transomd.errors import NotFoundError
from transomd.spec import JobSpec
from transomd.tol.plausible import plausible
from transomd.tol.reports import TOKEN_OUTLIVES_S
from transomd.words import JobState

OWN_TOKEN = "the-token-of-the-hostile-job-0123456789"
FAILURE = FailureReport(
    epoch=1, detected_at=5.0, detected_by="exit", lost_nodes=["n1"], fenced_at=6.0, unfenced=["n2"],
    evidence=[{"source": "log", "signature": "X", "text": "t", "role": "root"}],
)  # fmt: skip
LAUNCH = LaunchReport(
    epoch=1, nodes=["n1"], started_at=1.0, ended_at=2.0, resume_step=1, first_step=2, first_step_at=1.5,
    new_step_at=1.6, last_step=4, last_step_at=1.9, end_reason="ended",
)  # fmt: skip
REPORT = LauncherReport(
    job_id=1, attempt=1, slurm_job_id=4, generation=1, host="n1", phase="failed", at=7.0, nodes=["n1"], lost=["n2"],
    unfit={"n3": "why"}, launches=[LAUNCH], failure=FAILURE, past_failures=[FAILURE], checkpoint_step=1,
    checkpoint_epoch=2, checkpoint_at=3.0, exit_code=0, message="said",
)  # fmt: skip


def test_every_field_is_read() -> None:
    read = LauncherReport.from_json(json.loads(json.dumps(REPORT.to_json())))
    assert read.failure is not None
    assert read.failure.evidence[0]["text"] == "t"
    plain = replace(FAILURE, evidence=[])
    expected = replace(REPORT, failure=plain, past_failures=[plain])
    got = replace(read, failure=replace(read.failure, evidence=[]), past_failures=[plain])
    assert got == expected
    assert [past.epoch for past in read.past_failures] == [1]


BAD = [
    True,
    -1,
    1.5,
    math.nan,
    math.inf,
    10**18,
    2**70,
    "1",
    "",
    [],
    {},
    ["n1"],
    {"n1": 1},
    "n1\x1b[2J",
    "../etc",
    None,
]


@pytest.mark.parametrize("key", ["job_id", "attempt", "slurm_job_id", "generation", "host", "phase", "at"])
@pytest.mark.parametrize("value", BAD, ids=repr)
def test_a_needed_field_of_another_kind_is_refused(key: str, value: object) -> None:
    if (key, value) in (("at", 1.5), ("host", "1")):
        return
    with pytest.raises(ValueError, match=key):
        LauncherReport.from_json({**REPORT.to_json(), key: value})


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": ["n1", 7]}, {"nodes": "n1"}, {"nodes": ["n1\nn2"]}, {"nodes": ["n1"] * 50_001}, {"lost": [["n1"]]},
        {"unfit": ["n1"]}, {"unfit": {"n1": 5}}, {"unfit": {"-x": "why"}}, {"launches": {}}, {"launches": [7]},
        {"launches": [{}] * 65}, {"failure": []}, {"failure": {"epoch": 1}}, {"checkpoint_step": "last"},
        {"checkpoint_epoch": -1}, {"exit_code": -9}, {"message": ["a"]}, {"past_failures": [None]},
        {"launches": [{"epoch": -1, "nodes": ["n1"], "started_at": 1}]},
        {"failure": {"epoch": 1, "detected_at": 1, "detected_by": "probe"}},
        {"failure": {"epoch": 1, "detected_at": 1, "detected_by": "launcher-silent"}},
        {"failure": {"epoch": 1, "detected_at": 1, "detected_by": "exit", "evidence": [{"source": 1}]}},
        {"failure": {"epoch": 1, "detected_at": 1, "detected_by": "exit", "evidence": [{}] * 501}},
    ],
    ids=lambda change: str(change)[:60],
)  # fmt: skip
def test_what_is_out_of_all_proportion_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LauncherReport.from_json({**REPORT.to_json(), **change})


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 200_000, b'{"a": NaN}', b'{"a": -Infinity}', b'{"a":' * 99_999]
)
def test_a_body_that_is_no_plain_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        checked.parse(data)


def test_text_is_one_harmless_line_and_short() -> None:
    read = LauncherReport.from_json({**REPORT.to_json(), "message": "a\x1b]0;x\x07\nb\u202e" + "c" * 10_000})
    assert read.message.isprintable()
    assert len(read.message) == 500


def test_evidence_cannot_vouch_for_itself() -> None:
    evidence = [{"source": "probe", "signature": "PROBE-XID", "text": "x", "role": "root", "forgeable": False}]
    failure = {"epoch": 1, "detected_at": 1, "detected_by": "exit", "evidence": evidence}
    read = LauncherReport.from_json({**REPORT.to_json(), "failure": failure})
    assert read.failure is not None
    assert read.failure.evidence[0]["forgeable"] is True


# ------------------------------------------------------------------------------------------ against the real operator


class HostileWorld(SimWorld):
    """Where the launchers of job 2 are in the hands of whoever tests: none of them does what it should."""

    def _claim_and_start(self, number: int, *rest: Any) -> bool:
        return number != 2 and super()._claim_and_start(number, *rest)


class Arena:
    """A victim's job with an honest launcher, and a job whose launcher is whoever sends reports."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.victim = 1
        self.own = 2

    @classmethod
    async def make(cls) -> Arena:
        world = HostileWorld(8)
        await world.start_daemon()
        arena = cls(world)
        world.steps = 10**6
        await world.submit({"nodes": 2, "spares": 0})
        await world.until(lambda: world.state(1) is JobState.RUNNING, "the victim's job runs")
        operator = world.operator
        assert operator is not None
        values = {"name": "own", "command": "x", "nodes": 2, "spares": 1, "health": {"collective": False}}
        spec = JobSpec.from_stored(values)
        job = Job(
            name="own", user="root", uid=0, spec=spec.model_dump(mode="json"), run_dir="/run/own", cwd="/",
            token_sha256=hashlib.sha256(OWN_TOKEN.encode()).hexdigest(), state=JobState.SUBMITTED.value, reason="new",
            created_at=world.now, changed_at=world.now,
        )  # fmt: skip
        await operator.submit(job)
        await world.until(lambda: (found := arena.slurm_job()) is not None and found.nodes, "the hostile job starts")
        await world.run(5.0)
        # A node that is nobody's has just gone silent: naming it must not get it drained.
        world.slurm.fail_node("n8")
        return arena

    async def close(self) -> None:
        assert self.world.operator is not None
        await self.world.operator.close()
        self.world.store.close()

    def slurm_job(self) -> SlurmJob | None:
        jobs = [job for job in self.world.slurm.all_jobs().values() if job.comment == f"transom:{self.own}:1"]
        return jobs[0] if jobs else None

    async def send(self, body: bytes) -> None:
        """As the API does it."""
        operator = self.world.operator
        assert operator is not None
        try:
            report = LauncherReport.from_json(checked.parse(body))
            await operator.report(report, OWN_TOKEN)
        except (ValueError, PermissionError, NotFoundError):
            pass


class _Keeper(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.ERROR)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextmanager
def no_fault_is_logged() -> Iterator[None]:
    """Fail for anything that the daemon logs as an error."""
    records: list[logging.LogRecord] = []
    handler = _Keeper(records)
    logging.getLogger("transom").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("transom").removeHandler(handler)
    assert not records, [(r.getMessage(), r.exc_info) for r in records]


NODES = st.sampled_from(["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "login", "n3.example"])
INTS = st.sampled_from([*range(8), 2**31 - 2])
TIMES = st.sampled_from([*range(1_800_000_000, 1_800_000_900, 100), 0, 1e10, 9.9e10])
TEXT = st.one_of(st.text(max_size=20), st.just("slurmstepd: error: *** JOB 1 ON n8 CANCELLED DUE TO NODE FAILURE ***"))
WRONG = st.sampled_from([-1, 2**31, 2**53, 10**18, 2**70, 1e11, 1e300, math.nan, math.inf, True, "n1", [["n1"]], {}])
JUNK = st.one_of(
    WRONG,
    st.recursive(st.one_of(st.none(), WRONG, TEXT), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


def nearly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly of the right kind: a report of nothing but junk never gets far."""
    return st.integers(0, 40).flatmap(lambda number: JUNK if number == 40 else strategy)


EVIDENCE = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["log", "kernel", "slurm", "probe", "heartbeat", "exit", "progress"]),
        "signature": st.sampled_from(["XID-79", "HEARTBEAT-LOST", "SLURM-NODE-DOWN", "PROBE-XID", "SL-NODEFAIL", "X"]),
        "text": TEXT,
        "role": st.sampled_from(["root", "victim", "context"]),
        "blame": st.sampled_from(["node", "program", "network", "external", "unknown", "storage", "none"]),
        "action": st.sampled_from(["drain", "exclude", "restart", "stop", "wait"]),
        "failure_class": st.sampled_from(
            ["gpu-hardware", "host", "preemption", "cancelled", "time-limit", "numeric", "config", "unknown"]
        ),
        "node": st.one_of(NODES, st.just("")),
        "forgeable": st.booleans(),
    },
    optional={"at": TIMES, "peer_nodes": st.lists(NODES, max_size=2), "rank": INTS},
)
LAUNCHES = st.fixed_dictionaries(
    {"epoch": nearly(INTS), "nodes": nearly(st.lists(NODES, max_size=4)), "started_at": nearly(TIMES)},
    optional={
        "last_step": nearly(INTS), "first_step": INTS, "ended_at": nearly(TIMES), "new_step_at": TIMES,
        "end_reason": TEXT,
    },
)  # fmt: skip
FAILURES = st.fixed_dictionaries(
    {
        "epoch": nearly(INTS),
        "detected_at": nearly(TIMES),
        "detected_by": st.sampled_from(["exit", "heartbeat", "stall", "takeover", "start", "asked"]),
    },
    optional={
        "evidence": nearly(st.lists(EVIDENCE, max_size=4)),
        "lost_nodes": st.lists(NODES, max_size=3),
        "unfenced": st.lists(NODES, max_size=3),
        "fenced_at": TIMES,
    },
)
REPORTS = st.fixed_dictionaries(
    {"phase": st.sampled_from(["gate", "running", "failed", "failed", "running", "stopped"]), "host": nearly(NODES)},
    optional={
        "generation": nearly(st.sampled_from([1, 1, 1, 2, 2**31 - 1])),
        "nodes": nearly(st.lists(NODES, max_size=8)),
        "lost": nearly(st.lists(NODES, max_size=4)),
        "unfit": nearly(st.dictionaries(NODES, TEXT, max_size=3)),
        "launches": nearly(st.lists(LAUNCHES, max_size=4)),
        "failure": nearly(FAILURES),
        "past_failures": st.lists(FAILURES, max_size=2),
        "checkpoint_step": INTS,
        "checkpoint_epoch": INTS,
        "checkpoint_at": TIMES,
        "message": TEXT,
        "extra": JUNK,
    },
)


@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.tuples(REPORTS, st.sampled_from([0.0, 0.5, 2.0, 15.0])), min_size=1, max_size=8))
def test_no_report_harms_anybody_else(story: list[tuple[dict[str, Any], float]]) -> None:
    asyncio.run(_play(story))


async def _play(story: list[tuple[dict[str, Any], float]]) -> None:
    arena = await Arena.make()
    world = arena.world
    theirs = arena.slurm_job()
    assert theirs is not None
    before = [launch.epoch for launch in world.store.launches(arena.victim)]
    with no_fault_is_logged():
        for report, seconds in story:
            base = {
                "job_id": arena.own, "attempt": 1, "slurm_job_id": theirs.job_id, "generation": 1, "at": world.now,
                "nodes": list(theirs.nodes),
            }  # fmt: skip
            await arena.send(json.dumps({**base, **report}).encode())
            await world.run(seconds)
        await world.run(20.0)
    _check(arena, theirs, before)
    await arena.close()


def _check(arena: Arena, theirs: SlurmJob, before: list[int]) -> None:
    world = arena.world
    assert [call for call in world.slurm.calls if call.verb == "drain"] == [], "nothing that a user forges drains"
    assert world.state(arena.victim) is JobState.RUNNING
    assert [launch.epoch for launch in world.store.launches(arena.victim)] == before
    assert world.store.incidents(arena.victim) == []
    own = {
        *theirs.nodes,
        *(n for j in world.slurm.all_jobs().values() if j.comment.startswith("transom:2:") for n in j.nodes),
    }
    for attempt in world.store.attempts(arena.own):
        assert {*attempt.nodes, *attempt.barred, *attempt.excluded} <= own
    for incident in world.store.incidents(arena.own):
        assert {*incident.nodes, *incident.data.get("await_drain", {})} <= own
        assert incident.detected_at <= world.now
    for event in world.store.events(job_id=arena.own):
        assert event.message.isprintable()
    told = json.dumps([str(world.store.job(arena.own)), [str(x) for x in world.store.launches(arena.own)]])
    assert len(told) < 200_000


async def test_a_silent_node_of_nobodys_is_not_drained_because_a_job_names_it() -> None:
    arena = await Arena.make()
    job = arena.slurm_job()
    assert job is not None
    assert "n8" not in job.nodes
    evidence = [
        {"source": "slurm", "signature": "SLURM-NODE-DOWN", "text": "down", "role": "root", "blame": "node",
         "action": "drain", "node": "n8", "forgeable": False},
    ]  # fmt: skip
    launch = {"epoch": 1, "nodes": ["n8", "n7"], "started_at": 1.0}
    body = {
        "job_id": 2, "attempt": 1, "slurm_job_id": job.job_id, "generation": 1, "host": "n8", "phase": "failed",
        "at": 1.0, "nodes": list(job.nodes), "lost": ["n8"], "unfit": {"n8": "forged"}, "launches": [launch],
        "failure": {"epoch": 1, "detected_at": 1.0, "detected_by": "heartbeat", "evidence": evidence,
                    "lost_nodes": ["n8"], "unfenced": ["n8"]},
    }  # fmt: skip
    await arena.send(json.dumps(body).encode())
    await arena.world.run(60)
    assert [call for call in arena.world.slurm.calls if call.verb == "drain"] == []
    await arena.close()


async def test_times_of_the_future_count_as_now() -> None:
    arena = await Arena.make()
    operator, job = arena.world.operator, arena.slurm_job()
    assert operator is not None
    assert job is not None
    view = operator.view(arena.own)
    assert view is not None
    told = replace(
        REPORT,
        launches=[replace(LAUNCH, nodes=list(job.nodes), started_at=9e10, new_step_at=9e10)],
        failure=replace(FAILURE, detected_at=9e10, fenced_at=9e10),
        checkpoint_at=9e10,
    )
    now = arena.world.now
    read = plausible(view, told, operator.world(), now)
    assert read.failure is not None
    assert (read.failure.detected_at, read.failure.fenced_at, read.checkpoint_at) == (now, now, now)
    assert (read.launches[0].started_at, read.launches[0].new_step_at) == (now, now)
    await arena.close()


async def test_a_token_ends_with_its_job() -> None:
    arena = await Arena.make()
    operator = arena.world.operator
    assert operator is not None
    assert (await operator.launcher_job(OWN_TOKEN, 2)).job.id == 2
    assert (await operator.launcher_job(OWN_TOKEN, None)).job.id == 2
    with pytest.raises(PermissionError):
        await operator.launcher_job(OWN_TOKEN, 1)
    with pytest.raises(PermissionError):
        await operator.launcher_job("", None)
    await operator.cancel(2, "root")
    await arena.world.until(lambda: arena.world.state(2).final, "the job is cancelled")
    assert (await operator.launcher_job(OWN_TOKEN, 2)).job.id == 2, "its launcher has to be told"
    await arena.world.run(TOKEN_OUTLIVES_S + 60)
    with pytest.raises(PermissionError, match="over"):
        await operator.launcher_job(OWN_TOKEN, 2)
    await arena.close()
