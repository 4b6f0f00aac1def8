"""Random but well-formed jobs and worlds for property tests, and what recording a decision does to a job."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from transom_slurm.types import ExitStatus, JobBase, JobStatus, NodeStatus, SlurmJob, SlurmNode
from transom_sql.records import Attempt, Incident, Intent, Job, Launch

from transomd.api.wire import FailureReport, LauncherReport, LaunchReport
from transomd.health.types import CheckResult, NodeReport
from transomd.spec import JobSpec
from transomd.tol.view import Decision, JobView, SlurmView, World, merged
from transomd.words import IntentState, JobState, LauncherPhase, Outcome

NOW = 1_800_000_000.0
NODES = ("n1", "n2", "n3", "n4", "n5")
SPEC = JobSpec.from_stored({"name": "train", "command": "true", "nodes": 3, "spares": 1})
OPEN = [state for state in JobState if not state.final]

moments = st.sampled_from([NOW - 5000, NOW - 600, NOW - 100, NOW - 20, NOW - 1, NOW])
some_nodes = st.lists(st.sampled_from(NODES), unique=True, max_size=5)
epochs = st.integers(min_value=1, max_value=4)


def plain_job(number: int = 1, state: JobState = JobState.RUNNING) -> Job:
    """A job as it is recorded, of which nothing but its state matters."""
    return Job(
        id=number,
        name="train",
        user="ada",
        uid=1000,
        state=state.value,
        spec={},
        run_dir="/r",
        cwd="/",
        reason="",
        token_sha256="0" * 64,
        created_at=0.0,
        changed_at=0.0,
    )


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def slurm_jobs(draw: st.DrawFn, tag: str, number: int) -> SlurmJob:
    base = draw(st.sampled_from(list(JobBase)))
    flags = draw(st.sampled_from([frozenset[str](), frozenset({"COMPLETING"}), frozenset({"REQUEUE_HOLD"})]))
    waits = base is JobBase.PENDING
    return SlurmJob(
        job_id=number,
        name=draw(st.sampled_from([tag, tag, tag, "other"])),
        user="root",
        status=JobStatus(base, flags),
        state_text=base.value,
        reason=draw(st.sampled_from(["", "Resources", "launch_failed_requeued_held", "NodeDown", "JobHeldUser"])),
        submit_time=NOW - 5000,
        start_time=None if waits else draw(moments),
        end_time=draw(maybe(moments)),
        time_limit_s=draw(st.sampled_from([None, 60, 86400])),
        nodes=() if waits else tuple(draw(some_nodes)),
        exit=draw(st.sampled_from([None, ExitStatus(0), ExitStatus(143), ExitStatus(0, 15)])),
        restarts=draw(st.sampled_from([0, 0, 1])),
    )


@st.composite
def slurm_nodes(draw: st.DrawFn, name: str) -> SlurmNode:
    base = draw(st.sampled_from(["IDLE", "ALLOCATED", "DOWN", "UNKNOWN"]))
    flags = draw(st.frozensets(st.sampled_from(["NOT_RESPONDING", "DRAIN", "MAINTENANCE"]), max_size=2))
    reason = draw(st.sampled_from(["", "Prolog error", "Not responding", "transom[xid] x", "rack move"]))
    status = NodeStatus(base, flags)
    return SlurmNode(name=name, status=status, state_text=base, reason=reason, reason_user="root", reason_time=NOW - 50)


@st.composite
def probes(draw: st.DrawFn, name: str) -> NodeReport:
    reached = draw(st.booleans())
    check = CheckResult(check=draw(st.sampled_from(["xid", "disk"])), outcome=draw(st.sampled_from(list(Outcome))))
    return NodeReport(node=name, at=draw(moments), reached=reached, results=(check,) if reached else ())


@st.composite
def worlds(draw: st.DrawFn, attempt: Attempt | None, *, slurm_answers: bool | None = None) -> World:
    number = attempt.slurm_job_id if attempt is not None else None
    job = draw(maybe(slurm_jobs(attempt.tag, number))) if attempt is not None and number is not None else None
    answers = draw(st.booleans()) if slurm_answers is None else slurm_answers
    told = draw(st.booleans()) if slurm_answers is None else slurm_answers
    return World(
        slurm=SlurmView(
            jobs=({job.job_id: job} if job else {}) if answers else None,
            jobs_at=draw(moments),
            nodes={n: draw(slurm_nodes(n)) for n in NODES} if told else None,
            nodes_at=draw(moments),
            unsure=frozenset({number} if number and draw(st.booleans()) else ()),
            error="" if answers and told else "no answer",
        ),
        health={n: draw(probes(n)) for n in draw(some_nodes)},
        deaf=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def attempts(draw: st.DrawFn, number: int) -> Attempt:
    known = draw(st.booleans())
    nodes = tuple(draw(some_nodes)) if known else ()
    order = {"epoch": draw(epochs), "nodes": list(nodes) or ["n1"], "resume_step": None, "past_step": None}
    optional = {
        "order": order,
        "ordered_at": draw(moments),
        "fence": {"epoch": draw(epochs), "reason": "x", "at": draw(moments)},
        "checking_since": draw(moments),
        "absent_since": draw(moments),
        "completing_since": draw(moments),
        "host": draw(st.sampled_from(NODES)),
        "hosts_tried": draw(some_nodes),
    }
    data = {key: value for key, value in optional.items() if draw(st.booleans())}
    return Attempt(
        job_id=1,
        number=number,
        tag=f"train.tr-1-abcdefgh-{number}",
        created_at=NOW - 5000,
        slurm_job_id=7 + number if known else None,
        nodes=nodes,
        barred=tuple(n for n in nodes if draw(st.sampled_from([False, False, True]))),
        generation=draw(st.integers(min_value=1, max_value=3)) if known else 0,
        data={**data, "known_at": NOW - 5000} if known else {},
    )


@st.composite
def launches(draw: st.DrawFn, epoch: int) -> LaunchReport:
    started = draw(moments)
    last = draw(maybe(st.integers(min_value=1, max_value=50)))
    return LaunchReport(
        epoch=epoch,
        nodes=draw(some_nodes) or ["n1"],
        started_at=started,
        ended_at=draw(maybe(moments)),
        last_step=last,
        last_step_at=None if last is None else started,
        new_step_at=draw(maybe(moments)),
        end_reason=draw(st.sampled_from(["", "completed", "srun ended with exit code 1"])),
    )


@st.composite
def reports(draw: st.DrawFn, attempt: Attempt) -> LauncherReport:
    failure = FailureReport(
        epoch=draw(epochs),
        detected_at=draw(moments),
        detected_by="exit",
        evidence=[{"source": "log", "signature": "X", "role": "root"}, {"nonsense": 1}],
        lost_nodes=draw(some_nodes),
        unfenced=draw(some_nodes),
    )
    return LauncherReport(
        job_id=1,
        attempt=draw(st.sampled_from([attempt.number, attempt.number, attempt.number + 1])),
        slurm_job_id=attempt.slurm_job_id or 9,
        generation=draw(st.integers(min_value=1, max_value=3)),
        host=draw(st.sampled_from(NODES)),
        phase=draw(st.sampled_from(list(LauncherPhase))).value,
        at=draw(moments),
        nodes=draw(some_nodes),
        lost=draw(some_nodes),
        unfit=dict.fromkeys(draw(some_nodes), "bad"),
        launches=[draw(launches(e)) for e in sorted(draw(st.sets(epochs, max_size=3)))],
        failure=draw(maybe(st.just(failure))),
    )


@st.composite
def incidents(draw: st.DrawFn, number: int) -> Incident:
    plan = draw(st.sampled_from([None, {"action": "restart"}, {"action": "exclude", "new_attempt": True}]))
    data = {
        "detected_by": draw(st.sampled_from(["exit", "launcher-silent", "probe", "gate", "slurm"])),
        "opened_at": draw(moments),
        "not_before": draw(st.sampled_from([NOW - 5, NOW + 50])),
        **({"plan": plan} if plan else {}),
    }
    return Incident(
        id=number,
        job_id=1,
        attempt=1,
        epoch=draw(epochs),
        detected_at=draw(moments),
        diagnosed_at=draw(moments) if plan else None,
        closed_at=draw(maybe(moments)),
        failure_class=draw(st.sampled_from(["", "host", "user-code"])),
        nodes=tuple(draw(some_nodes)),
        data=data,
    )


@st.composite
def intents(draw: st.DrawFn, key: str, kind: str) -> Intent:
    state = draw(st.sampled_from([IntentState.PENDING, IntentState.DONE, IntentState.FAILED]))
    outcome = {"slurm_job_id": 8, "submit_time": NOW} if kind == "submit" else {"error": "no answer"}
    ended = None if state is IntentState.PENDING else draw(moments)
    return Intent(key=key, kind=kind, state=state.value, created_at=NOW, job_id=1, outcome=outcome, finished_at=ended)


@st.composite
def views(draw: st.DrawFn, *, healthy: bool = False) -> JobView:
    """A job in any state. ``healthy``: it runs, its launcher has just said so, and nobody wants it cancelled."""
    state = JobState.RUNNING if healthy else draw(st.sampled_from(OPEN))
    numbers = draw(st.sampled_from([(), (1,), (1,), (1, 2)])) if state is JobState.SUBMITTED else (1, 2)
    made = tuple(draw(attempts(n)) for n in numbers)
    if made and state in (JobState.CHECKING, JobState.RUNNING, JobState.RECOVERING):
        nodes = made[-1].nodes or NODES[:4]
        made = (*made[:-1], replace(made[-1], slurm_job_id=9, nodes=nodes, generation=max(1, made[-1].generation)))
    who = "" if healthy else draw(st.sampled_from(["", "", "alice"]))
    if state is JobState.SUBMITTED and not who:
        made = tuple(replace(attempt, slurm_job_id=None, generation=0, nodes=(), data={}) for attempt in made)
    found: dict[str, Intent] = {}
    for attempt in made:
        wanted = {f"cancel:1:{attempt.number}": "cancel", f"submit:1:{attempt.number}": "submit"}
        wanted[f"launcher:1:{attempt.number}:{attempt.generation}"] = "launcher"
        found |= {key: draw(intents(key, kind)) for key, kind in wanted.items() if draw(st.booleans())}
    job = Job(
        id=1,
        version=3,
        name="train",
        user="root",
        uid=0,
        spec={},
        run_dir="/r",
        cwd="/",
        token_sha256="a" * 64,
        state=state.value,
        reason="",
        created_at=NOW - 5000,
        changed_at=NOW - 5000,
        attempt=len(made),
        epoch=draw(st.integers(min_value=0, max_value=4)),
        cancel_requested_by=who,
    )
    report = draw(maybe(reports(made[-1]))) if made else None
    if healthy:
        report = replace(draw(reports(made[-1])), attempt=2, generation=9, phase="running", failure=None)
        report = replace(report, launches=[LaunchReport(epoch=4, nodes=["n1"], started_at=NOW - 20)])
    known = [
        Launch(job_id=1, epoch=e, attempt=max(1, len(made)), nodes=("n1", "n2"), started_at=NOW - 900)
        for e in sorted(draw(st.sets(epochs, max_size=2)))
    ]
    return JobView(
        job=job,
        spec=SPEC,
        attempts=made,
        launches=tuple(known),
        incidents=() if healthy else tuple(draw(incidents(n)) for n in range(1, draw(st.integers(1, 3)))),
        intents={} if healthy else found,
        report=report,
        report_at=NOW if healthy else draw(moments),
    )


def recorded(view: JobView, decision: Decision) -> JobView:
    """Return the view after a decision was recorded, as the store does it."""
    job = replace(view.job, state=decision.state.value, reason=decision.reason, **decision.job)
    incidents = {i.id: i for i in view.incidents}
    if decision.incident is not None:
        new = decision.incident.id or max(incidents, default=0) + 1
        incidents[new] = replace(decision.incident, id=new)
    numbers = itertools.count(len(view.intents) + 1)
    fresh = {i.key: replace(i, id=next(numbers)) for i in decision.intents if i.key not in view.intents}
    return replace(
        merged(view, job, decision.attempts, decision.launches),
        incidents=tuple(incidents[i] for i in sorted(incidents)),
        intents={**view.intents, **fresh},
    )
