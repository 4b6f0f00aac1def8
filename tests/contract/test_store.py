"""What every store must do, whatever database is below it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_server import PostgresServer
from transom_sql.engine import memory_store, open_store
from transom_sql.records import Attempt, Checkpoint, Event, Incident, Intent, Job, Launch, NodeRecord, Switch
from transom_sql.store import Change, Conflict, Store, StoreError

PROCESSES = Path(__file__).with_name("store_processes.py")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


def empty_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty one. A kind of database is added here, and to the two lists below."""
    if kind == "sqlite":
        return f"sqlite:///{folder}/transom.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    memory = request.param == "memory"
    opened = memory_store() if memory else open_store(empty_database(request.param, request, tmp_path))
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_database(request.param, request, tmp_path)


def job(**fields: Any) -> Job:
    known: dict[str, Any] = {
        "name": "train", "user": "ann", "uid": 1000, "spec": {"nodes": 4}, "run_dir": "/r", "cwd": "/c",
        "token_sha256": "ab", "state": "submitted", "reason": "recorded", "created_at": 10.0, "changed_at": 10.0,
    }  # fmt: skip
    return Job(**{**known, **fields})


def attempt(number: int, **fields: Any) -> Attempt:
    return Attempt(**{"job_id": 1, "number": number, "tag": f"transom:1:{number}", "created_at": 11.0, **fields})


def intent(key: str, **fields: Any) -> Intent:
    return Intent(**{"key": key, "kind": "submit", "state": "pending", "created_at": 12.0, **fields})


def event(message: str, **fields: Any) -> Event:
    return Event(**{"at": 13.0, "kind": "note", "message": message, **fields})


def incident(**fields: Any) -> Incident:
    return Incident(**{"job_id": 1, "attempt": 1, "epoch": 1, "detected_at": 14.0, **fields})


# --- every record comes back as it was given ---------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBER = st.integers(-(2**63), 2**63 - 1)
TIME = st.floats(allow_nan=False, allow_infinity=False)
NATURAL = st.integers(0, 2**63 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TIME | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=10), JSON, max_size=3)
BY_TYPE: Mapping[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    str | None: st.none() | TEXT,
    int: NUMBER,
    int | None: st.none() | NUMBER,
    float: TIME,
    float | None: st.none() | TIME,
    Mapping[str, Any]: OBJECT,
    tuple[str, ...]: st.lists(st.text(max_size=10), max_size=3).map(tuple),
    tuple[int, ...]: st.lists(st.integers(), max_size=3).map(tuple),
    tuple[Mapping[str, Any], ...]: st.lists(OBJECT, max_size=2).map(tuple),
}
KEYS = itertools.count()


def records(record: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_type = {name: BY_TYPE[hint] for name, hint in get_type_hints(record).items()}
    return st.builds(record, **{**by_type, **fields})


def one(value: Any) -> st.SearchStrategy[Any]:
    return st.just(value)


def keep_job(store: Store, given: Job) -> tuple[object, object]:
    added = store.add_job(given)
    changed = store.commit(Change(job=replace(given, id=added.id, version=1)))
    assert changed == replace(given, id=added.id, version=2)
    return store.job(added.id), changed


def keep_incident(store: Store, given: Incident) -> tuple[object, object]:
    store.commit(Change(incident=given))
    stored = store.incidents(1)[-1]
    store.commit(Change(incident=replace(stored, summary="again")))
    return store.incidents(1)[-1], replace(given, id=stored.id, summary="again")


def keep_intent(store: Store, given: Intent) -> tuple[object, object]:
    unique = replace(given, key=f"{next(KEYS)} {given.key}")
    store.commit(Change(intents=[unique]))
    stored = store.intent(unique.key)
    assert stored is not None
    return stored, replace(unique, id=stored.id)


def keep_event(store: Store, given: Event) -> tuple[object, object]:
    store.add_events([given])
    stored = store.events(limit=1)[0]
    return stored, replace(given, id=stored.id)


def keep_attempt(store: Store, given: Attempt) -> tuple[object, object]:
    store.commit(Change(attempts=[given]))
    return list(store.attempts(1)), [given]


def keep_launch(store: Store, given: Launch) -> tuple[object, object]:
    store.commit(Change(launches=[given]))
    return [found for found in store.launches(1) if found.epoch == given.epoch], [given]


def keep_node(store: Store, given: NodeRecord) -> tuple[object, object]:
    store.commit(Change(nodes=[given]))
    return store.node(given.name), given


def keep_switch(store: Store, given: Switch) -> tuple[object, object]:
    store.commit(Change(switches=[replace(given, reason="before")]))
    store.commit(Change(switches=[given]))
    return [found for found in store.switches() if found.name == given.name], [given]


def keep_checkpoint(store: Store, given: Checkpoint) -> tuple[object, object]:
    store.commit(Change(checkpoints=[given]))
    same = [found for found in store.checkpoints(1) if (found.step, found.epoch) == (given.step, given.epoch)]
    return same, [given]


ROUND_TRIPS: list[tuple[st.SearchStrategy[Any], Callable[[Store, Any], tuple[object, object]]]] = [
    (records(Job, id=one(0), version=one(0), attempt=NATURAL, epoch=NATURAL), keep_job),
    (records(Attempt, job_id=one(1), number=one(1), generation=NATURAL), keep_attempt),
    (records(Launch, job_id=one(1), attempt=one(1)), keep_launch),
    (records(Incident, id=one(0), job_id=one(1)), keep_incident),
    (
        records(
            Intent,
            id=one(0),
            state=st.sampled_from(["pending", "done", "failed", "dropped"]),
            job_id=st.sampled_from([None, 1]),
            incident_id=st.sampled_from([None, 1]),
            tries=NATURAL,
        ),
        keep_intent,
    ),
    (records(Event, id=one(0), job_id=st.sampled_from([None, 1])), keep_event),
    (records(NodeRecord, incident_id=st.sampled_from([None, 1])), keep_node),
    (records(Switch), keep_switch),
    (records(Checkpoint, job_id=one(1), step=NATURAL), keep_checkpoint),
]


@pytest.mark.parametrize(("strategy", "keep"), ROUND_TRIPS, ids=[keep.__name__ for _, keep in ROUND_TRIPS])
def test_records_come_back_as_they_were_given(store: Store, strategy: Any, keep: Any) -> None:
    store.add_job(job())
    store.commit(Change(attempts=[attempt(1)], incident=incident()))

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def check(record: Any) -> None:
        stored, expected = keep(store, record)
        assert stored == expected

    check()


def test_text_that_no_database_takes_is_stored_with_a_mark_in_its_place(store: Store) -> None:
    store.add_events([event("a\0b\ud800c", data={"log": "a\0b\ud800c", "loss": [float("nan"), float("-inf")]})])
    stored = store.events()[0]
    assert stored.message == "a\ufffdb\ufffdc"
    assert stored.data == {"log": "a\0b\ud800c", "loss": ["NaN", "-Infinity"]}


# --- changes -----------------------------------------------------------------------------------------------------


def test_a_new_job_gives_its_id_to_its_events_and_intents(store: Store) -> None:
    added = store.add_job(job(), events=[event("submitted")], intents=[intent("k")])
    assert added == job(id=1, version=1)
    assert [found.job_id for found in store.events(job_id=1)] == [1]
    assert [found.job_id for found in store.intents(job_id=1)] == [1]


def everything(store: Store) -> tuple[object, ...]:
    of_jobs = [(store.attempts(j.id), store.launches(j.id), store.checkpoints(j.id)) for j in store.jobs(limit=None)]
    return store.jobs(limit=None), of_jobs, store.incidents(), store.intents(), store.events(), store.nodes()


def full_change(read: Job) -> Change:
    return Change(
        job=replace(read, state="recovering"),
        attempts=[attempt(1)],
        launches=[Launch(job_id=1, epoch=1, attempt=1, nodes=("n1",), started_at=1.0)],
        incident=incident(),
        nodes=[NodeRecord(name="n1", changed_at=1.0)],
        checkpoints=[Checkpoint(job_id=1, step=5, epoch=1, stage="storage", at=1.0)],
        intents=[intent("drain:n1")],
        drop_intents=["k"],
        events=[event("lost", job_id=1)],
    )


def test_a_change_is_all_there(store: Store) -> None:
    read = store.add_job(job(), intents=[intent("k")])
    stored = store.commit(full_change(read))
    assert stored == store.job(1) == replace(read, state="recovering", version=2)
    assert (len(store.attempts(1)), len(store.launches(1)), len(store.checkpoints(1))) == (1, 1, 1)
    assert [found.state for found in store.intents()] == ["dropped", "pending"]
    assert [found.message for found in store.events()] == ["lost"]
    number = store.incidents(1)[0].id
    assert [store.intents()[1].incident_id, store.nodes()[0].incident_id] == [number, number]


def test_a_conflict_does_nothing(store: Store) -> None:
    read = store.add_job(job(), intents=[intent("k")])
    store.commit(Change(job=replace(read, reason="first")))
    before = everything(store)
    with pytest.raises(Conflict) as caught:
        store.commit(full_change(read))
    assert "job 1" in str(caught.value)
    assert caught.value.hint
    assert everything(store) == before


def test_a_job_that_is_not_there_is_a_conflict(store: Store) -> None:
    with pytest.raises(Conflict):
        store.commit(Change(job=job(id=9, version=1)))


@pytest.mark.parametrize(
    "late",
    [event("of no job", job_id=99), event("no JSON", data={"x": object()}), event("too large", job_id=2**70)],
    ids=lambda found: found.message,
)
def test_a_late_failure_takes_everything_back(store: Store, late: Event) -> None:
    read = store.add_job(job(), intents=[intent("k")])
    before, change = everything(store), full_change(read)
    with pytest.raises(StoreError) as caught:
        store.commit(replace(change, events=[*change.events, late]))
    assert "commit job 1" in str(caught.value)
    assert everything(store) == before
    assert store.commit(change) is not None


def test_a_change_may_have_no_job(store: Store) -> None:
    assert (
        store.commit(Change(nodes=[NodeRecord(name="n1", changed_at=1.0)], events=[event("seen", node="n1")])) is None
    )
    assert store.node("n1") == NodeRecord(name="n1", changed_at=1.0)
    assert [found.message for found in store.events(node="n1")] == ["seen"]


def test_an_empty_change_is_lawful(store: Store) -> None:
    assert store.commit(Change()) is None


def test_two_attempts_cannot_claim_one_slurm_job(store: Store) -> None:
    store.add_job(job())
    claim = {"slurm_job_id": 7, "slurm_submit_time": 1.0}
    store.commit(Change(attempts=[attempt(1, **claim)]))
    with pytest.raises(StoreError):
        store.commit(Change(attempts=[attempt(2, **claim)]))
    store.commit(Change(attempts=[attempt(2, slurm_job_id=7, slurm_submit_time=2.0)]))


# --- intents -----------------------------------------------------------------------------------------------------


def test_an_intent_is_recorded_once(store: Store) -> None:
    store.commit(Change(intents=[intent("k", args={"n": 1})]))
    store.finish_intent("k", "done", {"slurm_job_id": 7}, 20.0)
    before = store.intents()
    store.commit(Change(intents=[intent("k", args={"n": 2})]))
    assert store.intents() == before


def test_finishing_an_intent_records_what_was_learned(store: Store) -> None:
    store.commit(Change(intents=[intent("k")]))
    learned = NodeRecord(name="n1", changed_at=20.0, drain_reason="transom[..]", drain_user="root", drain_time=20.0)
    store.finish_intent("k", "failed", {"error": "no"}, 20.0, events=[event("drained")], nodes=[learned])
    found = store.intent("k")
    assert found is not None
    assert (found.state, found.outcome, found.finished_at, found.tries) == ("failed", {"error": "no"}, 20.0, 0)
    assert store.node("n1") == learned
    assert len(store.events()) == 1


def test_retrying_an_intent_counts_the_try(store: Store) -> None:
    store.commit(Change(intents=[intent("k")]))
    store.retry_intent("k", 30.0, {"error": "busy"})
    store.retry_intent("k", 40.0, {"error": "busy again"})
    found = store.intent("k")
    assert found is not None
    assert (found.state, found.tries, found.not_before, found.finished_at) == ("pending", 2, 40.0, None)
    assert found.outcome == {"error": "busy again"}


def test_a_dropped_intent_stays_dropped_but_its_end_is_recorded(store: Store) -> None:
    store.commit(Change(intents=[intent("k")]))
    store.commit(Change(drop_intents=["k", "never heard of"]))
    store.retry_intent("k", 30.0, {})
    assert [found.state for found in store.intents()] == ["dropped"]
    store.finish_intent("k", "done", {"slurm_job_id": 7}, 40.0)
    assert [(found.state, found.outcome) for found in store.intents()] == [("done", {"slurm_job_id": 7})]


def test_an_ended_or_unknown_intent_is_not_changed(store: Store) -> None:
    store.commit(Change(intents=[intent("k")]))
    store.finish_intent("k", "done", {}, 20.0)
    before = everything(store)
    store.commit(Change(drop_intents=["k"]))
    for key in ("k", "unknown"):
        with pytest.raises(StoreError, match=f"intent {key}"):
            store.finish_intent(key, "failed", {}, 21.0, events=[event("never")])
        with pytest.raises(StoreError, match=f"intent {key}"):
            store.retry_intent(key, 21.0, {})
    assert everything(store) == before


# --- reads -------------------------------------------------------------------------------------------------------


def test_jobs_are_read_newest_first_by_state_and_user(store: Store) -> None:
    for state, user in [("queued", "ann"), ("running", "bob"), ("failed", "ann"), ("running", "ann")]:
        store.add_job(job(state=state, user=user))
    assert [found.id for found in store.jobs()] == [4, 3, 2, 1]
    assert [found.id for found in store.jobs(states={"running", "queued"}, user="ann")] == [4, 1]
    assert [found.id for found in store.jobs(limit=1)] == [4]
    assert list(store.jobs(states=())) == []
    assert store.job(5) is None


def test_events_are_read_from_the_end_or_after_an_id(store: Store) -> None:
    store.add_job(job())
    store.add_events([event(str(number), job_id=1 if number % 2 else None) for number in range(1, 10)])
    assert [found.message for found in store.events(limit=2)] == ["8", "9"]
    assert [found.message for found in store.events(after=3, limit=2)] == ["4", "5"]
    assert [found.message for found in store.events(job_id=1, limit=2)] == ["7", "9"]
    assert [found.message for found in store.events(job_id=1, after=1, limit=2)] == ["3", "5"]
    assert list(store.events(after=9)) == []
    assert len(store.events(limit=None)) == 9


def test_incidents_and_intents_are_read_by_id(store: Store) -> None:
    store.add_job(job())
    for number in range(3):
        store.commit(Change(incident=incident(summary=str(number)), intents=[intent(str(number), job_id=1)]))
    assert [found.summary for found in store.incidents(limit=2)] == ["1", "2"]
    assert list(store.incidents(2)) == []
    store.finish_intent("1", "done", {}, 1.0)
    assert [found.key for found in store.intents(states={"pending"}, job_id=1)] == ["0", "2"]
    store.commit(Change(intents=[intent("drain", kind="drain")]))
    assert [found.key for found in store.intents(kinds={"drain", "undrain"})] == ["drain"]
    assert store.intent("unknown") is None


def test_replacing_an_incident_that_is_not_there_is_refused(store: Store) -> None:
    store.add_job(job())
    with pytest.raises(StoreError, match="incident 5"):
        store.commit(Change(incident=incident(id=5)))


def test_records_of_a_job_are_read_in_order(store: Store) -> None:
    store.add_job(job())
    store.commit(Change(attempts=[attempt(2), attempt(1)]))
    steps = [(7, 1), (5, 2), (5, 1)]
    store.commit(Change(checkpoints=[Checkpoint(job_id=1, step=s, epoch=e, stage="", at=1.0) for s, e in steps]))
    assert [found.number for found in store.attempts(1)] == [1, 2]
    assert [(found.step, found.epoch) for found in store.checkpoints(1)] == sorted(steps)


# --- threads and processes ---------------------------------------------------------------------------------------


def test_several_threads_may_write(store: Store) -> None:
    store.add_job(job())
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(20):
                store.add_events([event("x", job_id=1)])
                store.job(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.events()) == 60


def test_what_was_committed_is_there_when_opened_again(url: str) -> None:
    first = open_store(url)
    added = first.add_job(job(), events=[event("x")])
    first.close()
    second = open_store(url, create=False)
    assert second.job(1) == added
    assert len(second.events()) == 1
    second.close()


def test_a_new_database_may_be_opened_by_several_at_once(url: str) -> None:
    done = subprocess.run([sys.executable, PROCESSES, "open", url, "4"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_killing_the_writer_leaves_each_change_whole(url: str) -> None:
    """State, attempt, event and intent of a commit are all there or none, and an acknowledged one is there."""
    done = subprocess.run(
        [sys.executable, PROCESSES, "kill", url, "45"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, commits = map(int, done.stdout.split())
    assert kills == 45
    assert commits >= 30


def test_two_processes_writing_at_once_lose_nothing(url: str) -> None:
    store = open_store(url)
    store.add_job(job())
    writers = [subprocess.Popen([sys.executable, PROCESSES, "compete", url, "60"]) for _ in range(2)]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    found = store.job(1)
    assert found is not None
    assert (found.version, found.attempt) == (121, 120)
    assert sorted(int(written.message) for written in store.events()) == list(range(1, 121))
    store.close()


def test_the_newest_records_of_many_jobs_in_few_queries(store: Store) -> None:
    numbers = [store.add_job(job(token_sha256=str(n))).id for n in range(1203)]
    busy, idle = numbers[700], numbers[3]
    store.commit(Change(attempts=[replace(attempt(n), job_id=busy, tag=f"t{n}") for n in (1, 2, 11)]))
    launches = [Launch(job_id=busy, epoch=e, attempt=2, nodes=("n1",), started_at=float(e)) for e in (1, 9, 10)]
    store.commit(Change(launches=launches))
    store.commit(Change(incident=incident(job_id=busy, summary="first")))
    store.commit(Change(incident=incident(job_id=busy, summary="second")))
    found = store.latest(numbers)
    assert set(found) == set(numbers)
    assert [getattr(found[busy].attempt, "number", None), getattr(found[busy].incident, "summary", None)] == [
        11,
        "second",
    ]
    assert found[busy].launch == launches[-1]
    assert (found[busy].launches, found[idle].launches, found[idle].attempt) == (3, 0, None)
    assert store.latest([]) == {}
