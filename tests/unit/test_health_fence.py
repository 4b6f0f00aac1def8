"""Fencing over SSH, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from health_sshd import Sshd

from transomd.health import endjob
from transomd.health.fence import fence, fence_all
from transomd.health.scripts import END_JOB
from transomd.health.ssh import SshPool

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="logs in as root")

JOB = f"j-test-{os.getpid()}"
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``sleep`` (or another command) with marks in its environment."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(job: str, epoch: str | None, argv: list[str] | None = None, **more: str) -> subprocess.Popen[bytes]:
        marks = {"TRANSOM_JOB_ID": job} | ({} if epoch is None else {"TRANSOM_EPOCH": epoch}) | more
        env = {"PATH": "/usr/bin:/bin", **marks}
        running.append(subprocess.Popen(argv or ["sleep", "300"], env=env, stdout=subprocess.PIPE))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def wait_gone(process: subprocess.Popen[bytes]) -> bool:
    return process.wait(60) == -9


async def test_ends_this_job_up_to_the_epoch_and_nothing_else(pool: SshPool, start: Start) -> None:
    old, same = start(JOB, "1"), start(JOB, "2")
    newer, launcher = start(JOB, "3"), start(JOB, None)
    others = [
        start(JOB + "0", "1"),
        start(JOB[:-1], "1"),
        start("x", "1", NOTE=f"TRANSOM_JOB_ID={JOB}"),
        start(JOB, "2x"),
    ]
    report = await fence(pool, "n1", JOB, 2)
    assert report.clean
    assert set(report.killed) == {old.pid, same.pid}
    assert wait_gone(old)
    assert wait_gone(same)
    assert all(process.poll() is None for process in (newer, launcher, *others))


async def test_without_an_epoch_everything_of_the_job_ends(pool: SshPool, start: Start) -> None:
    program, launcher, other = start(JOB, "7"), start(JOB, None), start(JOB + "0", None)
    report = await fence(pool, "n1", JOB, None)
    assert set(report.killed) == {program.pid, launcher.pid}
    assert other.poll() is None


async def test_descendants_that_dropped_the_marks_end_too(pool: SshPool, start: Start) -> None:
    script = "env -i sleep 301 & echo $!; env TRANSOM_JOB_ID=other sleep 302 & echo $!; wait"
    parent = start(JOB, "1", ["sh", "-c", script])
    assert parent.stdout is not None
    bare, foreign = (int(parent.stdout.readline()) for _ in range(2))
    wait_for_environment(foreign, b"TRANSOM_JOB_ID=other")
    wait_for_environment(bare, b"")
    report = await fence(pool, "n1", JOB, 1)
    assert set(report.killed) == {parent.pid, bare}
    os.kill(foreign, 9)


def wait_for_environment(pid: int, expected: bytes) -> None:
    """Until the process runs ``sleep`` with an environment that begins so."""
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
        assert time.monotonic() < end
        time.sleep(0.01)
    assert expected in Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_program_that_forks_all_the_time_ends(pool: SshPool, start: Start) -> None:
    forker = start(JOB, "1", [sys.executable, "-S", "-c", FORKER])
    report = await fence(pool, "n1", JOB, 1)
    assert report.clean
    assert report.killed
    forker.wait(60)
    again = await fence(pool, "n1", JOB, 1)
    assert (again.clean, again.killed) == (True, ())


FORKER = """
import os, time
end = time.time() + 20
while time.time() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.25)
"""


async def test_an_unreachable_node_is_not_clean(sshd: Sshd, pool: SshPool) -> None:
    sshd.stop("n2")
    try:
        reports = await fence_all(pool, ["n1", "n2"], JOB, 1)
    finally:
        sshd.start("n2")
    assert reports["n1"].clean
    assert not reports["n2"].clean
    assert (reports["n2"].reached, reports["n2"].failure) == (False, "refused")


async def test_an_empty_job_is_refused(pool: SshPool) -> None:
    with pytest.raises(ValueError, match="empty mark"):
        await fence(pool, "n1", "", 1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TRANSOM_EPOCH": "1"}, None),
        ({"TRANSOM_JOB_ID": "j1"}, False),
        ({"TRANSOM_JOB_ID": "j1", "TRANSOM_EPOCH": "2"}, True),
        ({"TRANSOM_JOB_ID": "j1", "TRANSOM_EPOCH": "10"}, False),
        ({"TRANSOM_JOB_ID": "j1", "TRANSOM_EPOCH": "-1"}, False),
        ({"TRANSOM_JOB_ID": "j10", "TRANSOM_EPOCH": "1"}, False),
        ({"TRANSOM_JOB_ID": "", "TRANSOM_EPOCH": "1"}, False),
    ],
)
def test_match(environment: Mapping[str, str], expected: bool | None) -> None:
    request = {"name": "TRANSOM_JOB_ID", "value": "j1", "epoch": 2}
    assert endjob.matches(dict(environment), request) is expected


def test_a_process_that_cannot_die_is_remaining(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = start(JOB, "1")
    monkeypatch.setattr(endjob, "kill", lambda pid, request: None)
    request = {"name": "TRANSOM_JOB_ID", "value": JOB, "epoch": 1, "deadline": 0.1}
    assert endjob.main([str(END_JOB), json.dumps(request)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["pid"] for one in answer["remaining"]] == [stuck.pid]
    assert answer["killed"] == []
