"""The pyslurm client when its worker hangs, crashes, lies or is of another Slurm: real processes, a scripted pyslurm.

What real pyslurm answers is held by tests/contract/test_slurm_client.py and tests/cluster/test_slurm_pyslurm_real.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transom_slurm.commands import CommandClient
from transom_slurm.errors import SlurmUnavailable
from transom_slurm.parsers import JOB_FIELDS
from transom_slurm.pyslurm_client import REST_S, PyslurmClient, PyslurmUnusable, choose_client, release
from transom_slurm.pyslurm_process import RECYCLE_AFTER, worker_argv
from transom_slurm.runner import CommandTimeout, Completed

PYSLURM = """
import os, sys, time, ctypes, signal
__version__ = "22.5.3"
class RPCError(Exception): pass
class Job:
    id, name, user_id, state, state_reason, comment, partition = 7, "j", 0, "RUNNING", None, "c", "p"
    account = qos = ""
    submit_time, start_time, end_time, time_limit, allocated_nodes, batch_host = 1000, 1001, None, 30, "n[1-2]", "n1"
    priority, requeue_count, working_directory, is_requeueable = 5, 0, "/w", False
class Jobs:
    @staticmethod
    def load():
        {load}
        return {{7: Job()}}
{more}
"""
HANG = "ctypes.PyDLL(None).sleep(60)"  # with the interpreter's lock, as pyslurm does
CONFIG = "SLURM_VERSION           = 22.05.8\n"


class Commands:
    """Slurm's commands as a script: what they were asked, and the version that runs."""

    def __init__(self, config: str | Exception = CONFIG) -> None:
        self.config = config
        self.asked: list[str] = []
        self.row: dict[str, str] = {}

    async def __call__(self, argv: Sequence[str], **_: Any) -> Completed:
        self.asked.append(" ".join(argv[:3]))
        if argv[0] == "squeue":
            token = argv[-1].partition(":")[2].partition(",")[0]
            return Completed(tuple(argv), 0, "".join(self.row[f] + token for f in JOB_FIELDS if self.row), "", 0.0)
        if isinstance(self.config, Exception):
            raise self.config
        return Completed(tuple(argv), 0, self.config, "", 0.0)


Make = Callable[..., Sequence[str]]


@pytest.fixture
def library(tmp_path: Path) -> Make:
    """``library(load="...", more="...")``: the command of a worker that finds this pyslurm."""

    def make(load: str = "pass", more: str = "", text: str | None = None) -> Sequence[str]:
        source = PYSLURM.format(load=load, more=more) if text is None else text
        (tmp_path / "pyslurm.py").write_text(source)
        worker = worker_argv()[-1]
        run = (
            f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({worker!r}, run_name='__main__')"
        )
        return (sys.executable, "-I", "-B", "-c", run)

    return make


Connect = Callable[..., PyslurmClient]


@pytest.fixture
async def connect(library: Make) -> AsyncIterator[Connect]:
    """``connect(load=..., commands=...)``: a client, closed after the test."""
    made: list[PyslurmClient] = []

    def make(commands: Commands | None = None, deadline_s: float = 10.0, **script: Any) -> PyslurmClient:
        env = {"PATH": os.environ["PATH"]}
        slurm = CommandClient(commands or Commands(), env=env)
        clock = script.pop("clock", time.monotonic)
        client = PyslurmClient(slurm, argv=library(**script), env=env, deadline_s=deadline_s, clock=clock)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_an_answer(connect: Connect) -> None:
    commands = Commands()
    client = connect(commands)
    (job,) = (await client.jobs()).values()
    assert (job.job_id, job.user, job.nodes, job.time_limit_s, job.may_requeue) == (
        7,
        "root",
        ("n1", "n2"),
        1800,
        False,
    )
    assert client.why == "pyslurm 22.5.3 answers queries: it imports, and Slurm 22.05.8 runs here"
    assert commands.asked == ["scontrol show config"]


async def test_a_call_that_hangs_is_killed_and_nobody_else_waits(connect: Connect) -> None:
    client = connect(load=HANG, deadline_s=3.0)
    turns = 0

    async def loop_goes_on() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(loop_goes_on())
    assert await client.check()
    pid = client.worker.pid
    assert pid
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="no answer within 3 s; its worker was killed"):
        await client.jobs()
    assert time.monotonic() - began < 20
    assert _gone(pid)
    assert turns > 20
    ticker.cancel()


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("ctypes.string_at(0)", "its worker was killed by SIGSEGV"),
        (
            "os.write(2, b'x\\npyslurm: fatal: no such thing\\n'); os._exit(1)",
            "ended with 1: pyslurm: fatal: no such thing",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its worker was killed by SIGKILL"),
    ],
)
async def test_a_crash_is_unknown_and_the_next_query_gets_a_new_worker(
    connect: Connect, tmp_path: Path, load: str, said: str
) -> None:
    once = tmp_path / "crashed"
    client = connect(load=f"if not os.path.exists({str(once)!r}): open({str(once)!r}, 'w').close(); {load}")
    with pytest.raises(SlurmUnavailable, match=said):
        await client.jobs()
    assert list(await client.jobs()) == [7]


async def test_a_cancelled_question_does_not_answer_the_next(connect: Connect, tmp_path: Path) -> None:
    once = tmp_path / "asked"
    client = connect(load=f"if not os.path.exists({str(once)!r}): open({str(once)!r}, 'w').close(); time.sleep(20)")
    assert await client.check()
    pid = client.worker.pid
    asking = asyncio.create_task(client.jobs())
    while not once.exists():
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert pid
    assert _gone(pid)
    assert list(await client.jobs()) == [7]


async def test_what_slurm_does_not_answer_is_unknown_and_the_worker_is_replaced(connect: Connect) -> None:
    """Slurm's library keeps the slurm.conf that it read: after a change it would call the old address for ever."""
    client = connect(load="raise RPCError('Unable to contact slurm controller (connect failure)')")
    assert await client.check()
    first = client.worker.pid
    with pytest.raises(SlurmUnavailable, match="Unable to contact") as caught:
        await client.jobs()
    assert caught.value.operation == "pyslurm jobs"
    assert first
    assert _gone(first)


async def test_old_errors_of_slurm_are_told_from_faults_of_pyslurm(connect: Connect) -> None:
    old = connect(load="raise ValueError('Zero Bytes were transmitted or received', 1007)")
    with pytest.raises(SlurmUnavailable, match="Zero Bytes"):
        await old.jobs()
    commands = Commands()
    broken = connect(commands, load="raise AttributeError('no such attribute')")
    assert dict(await broken.jobs()) == {}
    assert commands.asked[-1].startswith("squeue"), "what pyslurm cannot read, the commands can"


async def test_the_library_may_talk(connect: Connect) -> None:
    client = connect(load="print('chatter', flush=True); os.write(1, b'{\"rows\": 1}\\n')")
    assert list(await client.jobs()) == [7]


async def test_three_lost_workers_in_a_row_give_the_commands_their_turn_for_a_while(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    now, commands = 100.0, Commands()
    client = connect(commands, load="os._exit(3)", clock=lambda: now)
    for _ in range(3):
        with pytest.raises(SlurmUnavailable):
            await client.jobs()
    for _ in range(2):
        assert dict(await client.jobs()) == {}
    assert commands.asked[-1].startswith("squeue")
    assert "3 of pyslurm's workers were lost in a row" in client.why
    assert [record.getMessage() for record in caplog.records].count(client.why) == 1, "it is said once"
    now += REST_S + 1
    with pytest.raises(SlurmUnavailable):
        await client.jobs()


async def test_exit_codes_come_from_squeue_once_for_each_ending(connect: Connect) -> None:
    commands = Commands()
    texts = {"JobId": "7", "UserName": "root", "State": "FAILED", "SubmitTime": "1000", "exit_code": "35072"}
    numbers = dict.fromkeys(("RestartCnt", "PriorityLong", "DerivedEC", "Requeue", "StartTime", "EndTime"), "0")
    commands.row = dict.fromkeys(JOB_FIELDS, "") | numbers | texts
    client = connect(commands, more="Job.state = 'FAILED'")
    for _ in range(3):
        (job,) = (await client.jobs()).values()
        assert job.exit
        assert (job.exit.code, job.end_time) == (137, None)
    assert len([asked for asked in commands.asked if asked.startswith("squeue")]) == 1
    commands.row["SubmitTime"] = "999"
    again = connect(commands, more="Job.state = 'FAILED'")
    (job,) = (await again.jobs()).values()
    assert job.exit is None, "another job of the same id ended so"


async def test_a_job_that_was_purged_before_squeue_was_asked_is_gone(connect: Connect) -> None:
    client = connect(Commands(), more="Job.state = 'FAILED'")
    assert dict(await client.jobs()) == {}


async def test_a_record_that_pyslurm_cannot_read_is_asked_of_squeue(connect: Connect) -> None:
    commands = Commands()
    texts = {"JobId": "7", "UserName": "root", "State": "PENDING", "SubmitTime": "1000", "Name": "\udcff"}
    numbers = dict.fromkeys(("RestartCnt", "PriorityLong", "DerivedEC", "Requeue", "StartTime", "EndTime"), "0")
    commands.row = dict.fromkeys(JOB_FIELDS, "") | numbers | texts | {"exit_code": "0"}
    client = connect(commands, more="Job.name = property(lambda self: bytes([255]).decode())")
    (job,) = (await client.jobs()).values()
    assert job.name == "\udcff"


async def test_a_worker_is_replaced_after_many_questions(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transom_slurm.pyslurm_process.RECYCLE_AFTER", 3)
    assert RECYCLE_AFTER > 100
    client = connect()
    pids = []
    for _ in range(6):
        await client.jobs()
        pids.append(client.worker.pid)
    assert pids[2] is pids[5] is None, "the third was its last"
    assert pids[0] == pids[1] != pids[3] == pids[4]


ENV: Mapping[str, str] = {"PATH": os.environ["PATH"]}


async def test_the_choice_and_its_reason(library: Make) -> None:
    commands = CommandClient(Commands(), env=ENV)
    client, why = await choose_client(commands, "commands")
    assert client is commands
    assert why == 'Slurm\'s commands answer queries: slurm.client is "commands"'
    client, why = await choose_client(commands, argv=library(), env=ENV)
    assert isinstance(client, PyslurmClient)
    assert why == client.why
    await client.close()
    for text, cause in (
        (
            "raise ImportError('libslurm.so.38: cannot open shared object file')",
            "pyslurm does not import in .*libslurm",
        ),
        ("__version__ = '23.11.0'", "pyslurm 23.11.0 was built for another Slurm than the 22.05.8 that runs"),
    ):
        client, why = await choose_client(commands, argv=library(text=text), env=ENV)
        assert client is commands
        assert re.search(cause, why)
        with pytest.raises(PyslurmUnusable, match=cause) as caught:
            await choose_client(commands, "pyslurm", argv=library(text=text), env=ENV)
        assert "pip install" in caught.value.hint


async def test_no_such_interpreter_is_a_reason_too() -> None:
    commands = CommandClient(Commands(), env=ENV)
    client, why = await choose_client(commands, argv=worker_argv("/no/python"), env=ENV)
    assert client is commands
    assert "/no/python cannot be started: No such file" in why


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "os.write(2, b'fatal: no configuration\\n'); os._exit(1)",
            r"its worker ended with 1: fatal: no configuration",
        ),
        ("import ctypes; ctypes.string_at(0)", "its worker was killed by SIGSEGV"),
    ],
)
async def test_a_library_that_ends_or_crashes_on_import_is_left_alone(library: Make, text: str, cause: str) -> None:
    commands = CommandClient(Commands(), env=ENV)
    client, why = await choose_client(commands, argv=library(text=f"import os; {text}"), env=ENV)
    assert client is commands
    assert cause in why


async def test_slurm_is_upgraded_under_a_running_daemon(connect: Connect, tmp_path: Path) -> None:
    commands, away = Commands(), tmp_path / "away"
    client = connect(commands, load=f"if os.path.exists({str(away)!r}): raise RPCError('Unable to contact')")
    assert list(await client.jobs()) == [7]
    away.touch()
    with pytest.raises(SlurmUnavailable):
        await client.jobs()
    away.unlink()
    commands.config = CONFIG.replace("22.05.8", "23.11.4")
    assert dict(await client.jobs()) == {}
    assert commands.asked[-1].startswith("squeue")
    assert client.why.endswith("pyslurm 22.5.3 was built for another Slurm than the 23.11.4 that runs")


async def test_while_slurmctld_is_silent_the_comparison_is_put_off(library: Make) -> None:
    commands = Commands(CommandTimeout(["scontrol"], "no end within 20 s"))
    client, why = await choose_client(CommandClient(commands, env=ENV), argv=library(), env=ENV)
    assert isinstance(client, PyslurmClient)
    assert "could not be compared with the running Slurm yet" in why
    with pytest.raises(SlurmUnavailable):
        await client.jobs()
    commands.config = CONFIG
    assert list(await client.jobs()) == [7]
    assert client.why.endswith("Slurm 22.05.8 runs here")
    await client.close()


def test_a_worker_ends_with_the_daemon(library: Make) -> None:
    worker = subprocess.Popen(library(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(ENV))
    assert worker.stdin
    assert worker.stdout
    assert b"22.5.3" in worker.stdout.readline()
    worker.stdin.close()
    assert worker.wait(60) == 0
    worker.stdout.close()


def test_releases() -> None:
    assert release("22.05.8") == release("22.5.3") == (22, 5)
    assert release("24.11.5-Bull.1") == release("24.11.0")
    assert release("23.11.0") != release("23.2.0")
