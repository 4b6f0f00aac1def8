"""notify.command: told of what matters, given it safely, bounded in time and number, never in the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transom_sql.records import Intent, Job, Switch

from transomd.notify import WAITING, Notice, Notifier
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.act import Outcome
from transomd.tol.switches import tripped
from transomd.tol.view import Decision, JobView, SlurmView, stay
from transomd.words import IntentState, JobState

NOW = 1_800_000_000.0
HOSTILE = "x'; touch /tmp/never; $(touch /tmp/never) `id` \n --flag"


def settings(command: str, **notify: Any) -> Settings:
    return Settings.model_validate({"notify": {"command": command, **notify}, "daemon": {"cluster": "alps"}})


@pytest.fixture
async def notifier() -> AsyncIterator[Notifier]:
    made = Notifier(settings(""))
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ended(notifier: Notifier, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(notifier.sent.values()) < count:
            await asyncio.sleep(0.01)


def notice(**fields: Any) -> Notice:
    known = {"event": "node-drained", "at": NOW, "message": HOSTILE, "hint": "transom nodes", "node": "n1"}
    return Notice(**{**known, **fields})


async def test_the_command_gets_all_of_it_and_none_of_it_as_shell(notifier: Notifier, tmp_path: Path) -> None:
    notifier.use(settings(f'cat > {tmp_path}/in; printf %s "$TRANSOM_MESSAGE" > {tmp_path}/env; env > {tmp_path}/all'))
    notifier.tell(notice(job={"id": 3, "name": HOSTILE, "user": "ann", "state": "failed"}))
    await ended(notifier, 1)
    assert notifier.sent["done"] == 1
    told = json.loads((tmp_path / "in").read_text())
    assert told["message"] == HOSTILE
    assert told["job"] == {"id": 3, "name": HOSTILE, "user": "ann", "state": "failed"}
    assert (told["event"], told["cluster"], told["node"], told["hint"]) == (
        "node-drained",
        "alps",
        "n1",
        "transom nodes",
    )
    assert (tmp_path / "env").read_text() == HOSTILE
    assert "TRANSOM_EVENT=node-drained\n" in (tmp_path / "all").read_text()
    assert "TRANSOM_JOB_USER=ann\n" in (tmp_path / "all").read_text()
    assert not Path("/tmp/never").exists()


async def test_one_that_hangs_is_ended_with_all_that_it_started(
    notifier: Notifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier.use(settings(f"(sleep 60 & echo $! > {tmp_path}/child; wait)", timeout_s=2))
    began = time.monotonic()
    notifier.tell(notice())
    await ended(notifier, 1)
    assert time.monotonic() - began < 30
    assert notifier.sent["failed"] == 1
    assert "it did not end within 2 s" in caplog.text
    child = int((tmp_path / "child").read_text())
    async with asyncio.timeout(60):
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            await asyncio.sleep(0.01)


async def test_a_failure_is_logged_with_what_it_said(notifier: Notifier, caplog: pytest.LogCaptureFixture) -> None:
    notifier.use(settings("echo 'no route to pager' >&2; exit 7"))
    notifier.tell(notice(message="n1 was drained"))
    await ended(notifier, 1)
    assert "notify.command failed for node-drained (n1 was drained): exit code 7: no route to pager" in caplog.text


@pytest.mark.parametrize("command", ["true", "exec 0<&-", "yes | head -c 20000000 >&2"])
async def test_what_reads_nothing_or_says_much_is_no_fault(notifier: Notifier, command: str) -> None:
    notifier.use(settings(command))
    notifier.tell(notice(message="m" * 1_000_000 if command == "true" else "m"))
    await ended(notifier, 1)


async def test_a_child_that_keeps_the_pipe_open_holds_nobody_up(notifier: Notifier, tmp_path: Path) -> None:
    notifier.use(settings(f"setsid sleep 60 & echo $! > {tmp_path}/child", timeout_s=50))
    began = time.monotonic()
    notifier.tell(notice())
    await ended(notifier, 1)
    assert time.monotonic() - began < 40
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert notifier.sent["done"] == 1


async def test_a_flood_is_bounded_and_telling_never_waits(notifier: Notifier, caplog: pytest.LogCaptureFixture) -> None:
    notifier.use(settings("true"))
    for _ in range(WAITING + 50):
        notifier.tell(notice())
    assert notifier.sent["dropped"] == 50
    assert "notify.command is behind" in caplog.text
    await ended(notifier, WAITING + 50)
    assert notifier.sent["done"] == WAITING


async def test_without_a_command_nothing_is_run(notifier: Notifier) -> None:
    notifier.tell(notice())
    assert notifier.sent == {"done": 0, "failed": 0, "dropped": 0}


# --- what is told -------------------------------------------------------------------------------------------------


class Kept(Notifier):
    def __init__(self, **notify: Any) -> None:
        super().__init__(settings("true", **notify))
        self.notices: list[Notice] = []

    def tell(self, notice: Notice) -> None:
        self.notices.append(notice)


def view(state: JobState) -> JobView:
    job = Job(
        id=4, name="demo", user="ann", uid=1000, spec={}, run_dir="/r", cwd="/", token_sha256="0" * 64,
        state=state.value, reason="", created_at=NOW, changed_at=NOW,
    )  # fmt: skip
    return JobView(job=job, spec=JobSpec.from_stored({"name": "demo", "command": "true", "nodes": 2}))


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.HELD])
def test_a_job_that_a_person_should_look_at(state: JobState) -> None:
    kept = Kept()
    before = view(JobState.RECOVERING)
    kept.recorded(before, Decision(state=state, reason="the restart budget is used up"), NOW)
    kept.recorded(before, stay(before, "diagnosing"), NOW)
    kept.recorded(before, Decision(state=JobState.RUNNING, reason="runs"), NOW)
    assert [(n.event, n.hint, n.job["user"]) for n in kept.notices] == [(f"job-{state}", "transom status 4", "ann")]
    assert "the restart budget is used up" in kept.notices[0].message


def test_a_drain_of_transoms_own_and_not_a_persons() -> None:
    kept = Kept()
    args = {"node": "n1", "reason": "transom[xid] job=4 ev=1 XID 79", "check": "xid"}
    for key, state in (("drain:n1:1", "done"), ("drain:n2:1", "failed"), ("manual-drain:n3:x", "done")):
        intent = Intent(key=key, kind="drain", state="pending", created_at=NOW, args=args)
        kept.acted(intent, Outcome(state=IntentState(state)), NOW)
    assert [n.message for n in kept.notices] == ["n1 was drained: transom[xid] job=4 ev=1 XID 79"]


def test_a_budget_that_trips_and_not_its_reset() -> None:
    kept = Kept()
    kept.switched(tripped("per_hour", "4 nodes were drained", NOW), NOW)
    kept.switched(Switch(name="drain-budget:per_hour", changed_at=NOW, who="ann"), NOW)
    kept.switched(Switch(name="pause", changed_at=NOW, since=NOW, who="ann"), NOW)
    assert [n.event for n in kept.notices] == ["budget-tripped"]


def test_slurm_is_silent_for_long_and_it_is_said_once() -> None:
    kept = Kept(slurm_silent_s=600)
    silent = SlurmView(error="squeue: timed out")
    for minute in range(30):
        kept.looked(silent, NOW + 60 * minute)
    assert [n.message for n in kept.notices] == ["Slurm has not answered for 10 min: squeue: timed out"]
    kept.looked(SlurmView(), NOW + 1800)
    for minute in range(31, 45):
        kept.looked(silent, NOW + 60 * minute)
    assert len(kept.notices) == 2


def test_variables_hold_no_nul() -> None:
    assert "\0" not in "".join(notice(message="a\0b").environment("c").values())
    assert os.environ.get("TRANSOM_MESSAGE") is None
