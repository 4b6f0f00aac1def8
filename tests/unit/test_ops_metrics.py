"""What Prometheus reads: right numbers, few series, nothing that a user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tol_world import SimWorld, quick_settings
from transom_slurm.errors import SlurmRejected, SlurmUnavailable
from transom_sql.records import Switch

from transomd.metrics import MAX_JOBS, Metrics, metered
from transomd.tol.admit import Admission, Refusal
from transomd.tol.switches import tripped
from transomd.tol.view import SlurmView
from transomd.tol.watchers import Watchers
from transomd.words import JobState

NOW = 1_800_000_000.0


def read(metrics: Metrics, views: Mapping[int, Any] | None = None, **more: Any) -> dict[tuple[str, ...], float]:
    told = {"pending": [], "switches": {}, "version": "1", "notices": {"done": 3}, "log_lost": 2, **more}
    text = metrics.text(views or {}, **told).decode()
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_levels_and_ages() -> None:
    metrics = Metrics(lambda: NOW)
    assert read(metrics)[("transom_slurm_answer_age_seconds", "what=jobs")] == float("inf")
    metrics.looked(SlurmView(jobs={}, jobs_at=NOW - 7, nodes={}, nodes_at=NOW - 9), NOW)
    switches = {
        "pause": Switch(name="pause", changed_at=NOW, since=NOW, who="ann"),
        "drain-budget:per_hour": tripped("per_hour", "4", NOW),
    }
    found = read(metrics, switches=switches)
    assert found[("transom_slurm_answer_age_seconds", "what=nodes")] == 9
    assert found[("transom_paused",)] == 1
    assert found[("transom_budget_tripped", "budget=per_hour")] == 1
    assert found[("transom_jobs", "state=running")] == 0
    assert found[("transom_intents_pending", "kind=drain")] == 0
    assert found[("transom_log_records_lost",)] == 2
    assert found[("transom_notices", "outcome=done")] == 3
    assert found[("process_open_fds",)] > 0
    assert not [key for key in found if key[0].endswith("_created")]


async def test_calls_of_slurm_are_timed_and_told_apart() -> None:
    metrics = Metrics(lambda: NOW)

    class Client:
        why = "because"

        async def jobs(self) -> dict[int, object]:
            return {}

        async def nodes(self) -> None:
            raise SlurmUnavailable("sinfo", "timed out")

        async def drain(self, node: str, reason: str) -> None:
            raise SlurmRejected("scontrol", "no such node")

    client: Any = metered(Client(), metrics.asked)  # type: ignore[arg-type]
    assert await client.jobs() == {}
    assert client.why == "because"
    with pytest.raises(SlurmUnavailable):
        await client.nodes()
    with pytest.raises(SlurmRejected):
        await client.drain("n1", "x")
    found = read(metrics)
    assert found[("transom_slurm_query_seconds_count", "verb=jobs")] == 1
    assert found[("transom_slurm_failures_total", "kind=unavailable", "verb=nodes")] == 1
    assert found[("transom_slurm_failures_total", "kind=refused", "verb=drain")] == 1


def test_cycles_store_and_drains() -> None:
    metrics = Metrics(lambda: NOW)
    metrics.cycled(0.2, None)
    metrics.cycled(0.2, ValueError())
    metrics.stored(0.001, True)
    metrics.stored(10.0, False)
    intent: Any = None
    refused = (Refusal(intent=intent, reason="a long sentence", cause="per_hour"), Refusal(intent=intent, reason="x"))
    metrics.admitted(Admission(granted=(intent,), refused=refused), NOW)
    found = read(metrics)
    assert (found[("transom_cycle_seconds_count",)], found[("transom_cycles_failed_total",)]) == (2, 1)
    assert found[("transom_store_failures_total",)] == 1
    assert found[("transom_drains_granted_total",)] == 1
    assert found[("transom_drains_refused_total", "cause=per_hour")] == 1
    assert found[("transom_drains_refused_total", "cause=unknown")] == 1


def test_one_series_a_job_and_a_bound_on_them() -> None:
    from test_ops_notify import view

    metrics = Metrics(lambda: NOW)
    job = view(JobState.RUNNING)
    found = read(metrics, dict.fromkeys(range(1, MAX_JOBS + 500), job))
    shares = [key for key in found if key[0] == "transom_job_goodput_ratio"]
    assert len(shares) == MAX_JOBS
    assert ("transom_job_goodput_ratio", f"job={MAX_JOBS + 499}") in shares
    assert not [key for key in read(metrics) if key[0] == "transom_job_goodput_ratio"], "ended jobs leave no series"


def test_how_often_storage_gets_a_step_where_that_is_chosen() -> None:
    from test_ops_notify import view

    job = view(JobState.RUNNING)
    stages = [{"stage": "memory", "step": 9}, {"stage": "storage", "step": 8, "every": 64}]
    stages.append({"stage": "replica", "step": 6, "every": 2})
    chosen = replace(job, job=replace(job.job, data={"stages": stages}))
    found = read(Metrics(lambda: NOW), {3: job, 4: chosen})
    assert found[("transom_job_checkpoint_step", "job=4", "stage=storage")] == 8
    assert {key: value for key, value in found.items() if key[0] == "transom_job_storage_every_steps"} == {
        ("transom_job_storage_every_steps", "job=4"): 64
    }


async def test_a_failure_and_its_recovery() -> None:
    metrics = Metrics(lambda: NOW)
    world = SimWorld(5, settings=quick_settings())
    await world.start_daemon()
    assert world.operator is not None
    watchers = Watchers([metrics])
    world.operator._watcher = world.operator._acts._watcher = world.operator._docket._watcher = watchers
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n2"))
    assert await world.end() is JobState.COMPLETED
    found = read(metrics)
    assert found[("transom_jobs_ended_total", "state=completed")] == 1
    assert found[("transom_restarts_total", "class=host")] == 1
    assert found[("transom_incidents_total", "blame=node", "class=host")] == 1
    assert found[("transom_recover_seconds_count", "class=host")] == 1
    assert found[("transom_detect_seconds_count", "class=host")] == 1
    incident = world.incidents()[0]
    assert incident.recovered_at is not None
    took = incident.recovered_at - incident.detected_at
    assert found[("transom_recover_seconds_sum", "class=host")] == pytest.approx(took)
    assert found[("transom_acts_total", "kind=submit", "state=done")] == 1
    world.check()
    await world.close()
