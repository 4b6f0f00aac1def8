"""The Slurm in memory: its clock, its queue, and each fate that a test or the simulator can script."""

from __future__ import annotations

import pytest
from transom_slurm.batch import job_options
from transom_slurm.errors import SlurmDenied, SlurmRejected, SlurmUnavailable, SubmitAmbiguous
from transom_slurm.fake import FakeSlurm, SubmitFate
from transom_slurm.types import ExitStatus, JobBase, SlurmJob, SubmitRequest


def _request(nodes: int = 2, *, name: str = "transom-1-1", extra: tuple[str, ...] = (), **wishes: str) -> SubmitRequest:
    options = (*job_options(nodes=nodes, output="/dev/null", **wishes), *extra)  # type: ignore[arg-type]
    return SubmitRequest("#!/bin/sh\n", options, name, "transom:1:1", "/tmp")


PLAIN = SubmitRequest("#!/bin/sh\n", ("--nodes=2",), "plain", "", "/tmp")


async def _run(fake: FakeSlurm, request: SubmitRequest) -> int:
    job_id = await fake.submit(request)
    fake.advance()
    return job_id


async def _job(fake: FakeSlurm, job_id: int) -> SlurmJob:
    return (await fake.jobs())[job_id]


async def test_time_moves_only_when_told() -> None:
    fake = FakeSlurm(2, queue_delay_s=60)
    job_id = await fake.submit(_request())
    fake.advance(59)
    assert (await _job(fake, job_id)).status.base is JobBase.PENDING
    fake.advance(1)
    job = await _job(fake, job_id)
    assert (job.status.base, job.nodes) == (JobBase.RUNNING, ("n1", "n2"))
    assert job.start_time == fake.clock()


async def test_the_same_script_gives_the_same_story() -> None:
    async def story() -> list[object]:
        fake = FakeSlurm(5, queue_delay_s=3, completing_s=2)
        for n in (2, 3, 4):
            await fake.submit(_request(n, time_limit="10"))
        fake.at(30, lambda: fake.fail_node("n2"))
        told: list[object] = []
        for _ in range(100):
            fake.advance(13)
            told.append((await fake.jobs(), await fake.nodes()))
        return told

    assert await story() == await story()


async def test_jobs_wait_for_nodes_in_order() -> None:
    fake = FakeSlurm(4)
    first, second, small = [await _run(fake, _request(n)) for n in (3, 2, 1)]
    assert (await _job(fake, second)).reason == "Resources"
    assert (await _job(fake, small)).nodes == ("n4",)
    fake.finish(first)
    fake.advance()
    assert (await _job(fake, second)).nodes == ("n1", "n2")


async def test_excluded_drained_and_reserved_nodes_are_left_out() -> None:
    fake = FakeSlurm(5)
    fake.drain_by_person("n1", "swap")
    fake.reserve("mnt", ["n2"], maintenance=True)
    job_id = await _run(fake, _request(2, extra=("--exclude=n3",)))
    assert (await _job(fake, job_id)).nodes == ("n4", "n5")


async def test_ends() -> None:
    fake = FakeSlurm(4, completing_s=5)
    good, bad = await _run(fake, _request(1)), await _run(fake, _request(1))
    fake.finish(good, derived=7)
    fake.finish(bad, 3)
    assert (await _job(fake, good)).state_text == "COMPLETING"
    assert not (await _job(fake, good)).ended
    fake.advance(5)
    jobs = await fake.jobs()
    assert (jobs[good].status.base, jobs[good].derived_exit) == (JobBase.COMPLETED, ExitStatus(7))
    assert (jobs[bad].status.base, jobs[bad].exit, jobs[bad].reason) == (
        JobBase.FAILED, ExitStatus(3), "NonZeroExitCode",
    )  # fmt: skip
    assert jobs[good].ended


async def test_ended_jobs_are_forgotten_and_accounting_remembers() -> None:
    for accounting in (True, False):
        fake = FakeSlurm(2, accounting=accounting, min_job_age_s=300)
        job_id, began = await _run(fake, _request()), fake.now
        fake.finish(job_id, 1)
        fake.advance(301)
        assert await fake.jobs() == {}
        assert set(await fake.finished([job_id, 99], began)) == ({job_id} if accounting else set())
        assert await fake.finished([job_id], fake.now) == {}


async def test_time_limit() -> None:
    fake = FakeSlurm(2)
    job_id = await _run(fake, _request(time_limit="1:00:00"))
    fake.advance(3599)
    assert (await _job(fake, job_id)).status.base is JobBase.RUNNING
    fake.advance(1)
    assert (await _job(fake, job_id)).status.base is JobBase.TIMEOUT


async def test_a_longer_time_limit_counts_from_the_start() -> None:
    fake = FakeSlurm(2)
    job_id = await _run(fake, _request(time_limit="10"))
    fake.advance(300)
    await fake.update_job(job_id, {"TimeLimit": "20"})
    fake.advance(899)
    assert (await _job(fake, job_id)).status.base is JobBase.RUNNING
    fake.advance(1)
    assert (await _job(fake, job_id)).status.base is JobBase.TIMEOUT


async def test_a_lost_node_shrinks_a_no_kill_job_even_if_it_was_the_batch_host() -> None:
    fake = FakeSlurm(3, slurmd_timeout_s=30)
    job_id = await _run(fake, _request(3))
    agents = fake.add_step(job_id, "agents", no_kill=True)
    fake.add_step(job_id, "program")
    fake.fail_node("n1")
    fake.advance(15)
    node = (await fake.nodes())["n1"]
    assert not node.status.responding
    assert node.status.base == "ALLOCATED"
    fake.advance(15)
    node, job = (await fake.nodes())["n1"], await _job(fake, job_id)
    assert (node.status.base, node.reason) == ("DOWN", "Not responding")
    assert (job.status.base, job.nodes, job.batch_host) == (JobBase.RUNNING, ("n2", "n3"), "n2")
    assert list(await fake.steps(job_id)) == [agents]
    fake.heal_node("n1")
    assert (await fake.nodes())["n1"].status.base == "IDLE"


async def test_a_lost_node_ends_or_requeues_other_jobs() -> None:
    fake = FakeSlurm(4)
    plain = await _run(fake, PLAIN)
    strict = await _run(fake, SubmitRequest("#!/bin/sh\n", ("--nodes=2", "--no-requeue"), "s", "", "/tmp"))
    fake.set_down("n1", "kicked", "bob")
    fake.set_down("n3", "kicked", "bob")
    jobs = await fake.jobs()
    assert (jobs[plain].status.base, jobs[plain].restarts, jobs[plain].reason) == (JobBase.PENDING, 1, "BeginTime")
    assert (jobs[strict].status.base, jobs[strict].exit) == (JobBase.NODE_FAIL, ExitStatus(143))
    await fake.update_job(plain, {"StartTime": "now"})
    fake.advance()
    assert (await _job(fake, plain)).nodes == ("n2", "n4")


async def test_a_power_cycle_before_slurmd_timeout_goes_unnoticed() -> None:
    fake = FakeSlurm(2)
    job_id = await _run(fake, _request())
    fake.fail_node("n2")
    fake.advance(5)
    fake.heal_node("n2")
    fake.advance(60)
    assert (await _job(fake, job_id)).nodes == ("n1", "n2")
    assert (await fake.nodes())["n2"].boot_time == pytest.approx(fake.now - 60)


async def test_preemption_and_failed_launches() -> None:
    fake = FakeSlurm(4)
    ours, plain = await _run(fake, _request(2)), await _run(fake, PLAIN)
    fake.preempt(ours)
    fake.fail_launch(plain, "n3")
    jobs = await fake.jobs()
    assert (jobs[ours].status.base, jobs[ours].status.terminal, jobs[ours].ended) == (JobBase.PREEMPTED, False, True)
    assert (jobs[plain].reason, jobs[plain].priority) == ("launch failed requeued held", 0)
    assert (await fake.nodes())["n3"].reason == "Prolog error"
    fake.resume_by_person("n3")
    fake.advance(1)
    fake.start(plain)
    assert (await _job(fake, plain)).status.base is JobBase.RUNNING


async def test_outages_are_for_a_span_and_for_verbs() -> None:
    fake = FakeSlurm(2)
    fake.outage(60, "jobs", "nodes", cost_s=20)
    began = fake.now
    with pytest.raises(SlurmUnavailable):
        await fake.jobs()
    assert fake.now == began + 20
    await fake.config()
    fake.advance(40)
    assert await fake.jobs() == {}
    assert [(call.verb, call.answered) for call in fake.calls] == [("jobs", False), ("config", True), ("jobs", True)]


async def test_submissions_without_an_answer() -> None:
    fake = FakeSlurm(2)
    for fate, exists in ((SubmitFate.LOST, False), (SubmitFate.ACCEPTED_UNSAID, True)):
        fake.next_submit(fate)
        with pytest.raises(SubmitAmbiguous):
            await fake.submit(_request(name=fate.name))
        assert bool(await fake.find(fate.name)) is exists
    for fate, error in ((SubmitFate.REJECTED, SlurmRejected), (SubmitFate.DENIED, SlurmDenied)):
        fake.next_submit(fate)
        with pytest.raises(error):
            await fake.submit(_request())
    fake.outage(10)
    with pytest.raises(SubmitAmbiguous):
        await fake.submit(_request())


async def test_a_controller_that_lost_its_last_job_gives_its_id_again() -> None:
    fake = FakeSlurm(2)
    first = await _run(fake, _request(name="first"))
    fake.lose_newest_jobs()
    assert await fake.jobs() == {}
    assert (await fake.finished([first], 0))[first].state_text == "RUNNING", "accounting believes it for ever"
    fake.advance(10)
    second = await _run(fake, _request(name="second"))
    assert second == first
    job = await _job(fake, second)
    assert (job.name, job.submit_time) == ("second", fake.now)


async def test_without_rights_nothing_is_drained() -> None:
    fake = FakeSlurm(2, admin=False)
    for verb in (fake.drain("n1", "transom[x] y"), fake.resume("n1")):
        with pytest.raises(SlurmDenied):
            await verb
    assert not (await fake.nodes())["n1"].status.drain


async def test_a_drain_bears_who_and_when() -> None:
    fake = FakeSlurm(2, user="transom")
    await fake.drain("n1", "transom[xid] Xid 79")
    node = (await fake.nodes())["n1"]
    assert (node.reason, node.reason_user, node.reason_time) == ("transom[xid] Xid 79", "transom", fake.now)
    fake.advance(5)
    fake.drain_by_person("n1", "RMA", user="alice")
    node = (await fake.nodes())["n1"]
    assert (node.reason, node.reason_user, node.reason_time) == ("RMA", "alice", fake.now)


async def test_a_job_may_be_shrunk_but_not_to_strangers_nor_off_its_batch_host() -> None:
    fake = FakeSlurm(4)
    job_id = await _run(fake, _request(3))
    await fake.update_job(job_id, {"NodeList": "n[1,3]"})
    assert (await _job(fake, job_id)).nodes == ("n1", "n3")
    assert (await fake.nodes())["n2"].status.base == "IDLE"
    for bad in ("n[1,4]", "n3", "n[1-"):
        with pytest.raises(SlurmRejected):
            await fake.update_job(job_id, {"NodeList": bad})
    with pytest.raises(SlurmRejected, match="no longer pending"):
        await fake.update_job(job_id, {"ExcNodeList": "n1"})
