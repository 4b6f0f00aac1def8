"""The all-reduce over SSH, with real sshd and real torch."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from health_python import interpreter
from health_sshd import Sshd

from transomd.health.collective import MARK, CollectiveOptions, all_reduce
from transomd.health.ssh import SshPool
from transomd.health.types import CollectiveReport
from transomd.words import Outcome

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="logs in as root and runs the ranks as another user")


def options(sshd: Sshd, **changes: object) -> CollectiveOptions:
    user, python, env = interpreter()
    wanted: dict[str, object] = {
        "python": python,
        "user": user,
        "env": env,
        "address": sshd.addresses["n1"],
        "megabytes": 1,
        "iterations": 2,
    }
    return CollectiveOptions(**(wanted | changes))  # type: ignore[arg-type]


async def appears(path: Path, running: asyncio.Task[CollectiveReport]) -> None:
    """Wait until a file is there."""
    for _ in range(3000):
        if path.exists():
            return
        assert not running.done(), running.result()
        await asyncio.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def left_behind() -> list[int]:
    """Processes of this network that bear a collective's mark; tests of whole clusters run others in their own."""
    found, here = [], os.readlink("/proc/self/ns/net")
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}=".encode() in entry.read_bytes() and os.readlink(entry.parent / "ns" / "net") == here:
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def fake_python(path: Path, body: str) -> str:
    """An interpreter that does something else for the second rank."""
    real = interpreter()[1]
    path.write_text(f'#!/bin/sh\ncase "$2" in *\'"rank": 1,\'*) {body} ;; esac\nexec {real} "$@"\n')
    path.chmod(0o755)
    return str(path)


async def test_two_nodes_as_the_user(sshd: Sshd, pool: SshPool) -> None:
    pytest.importorskip("torch")
    report = await all_reduce(pool, ["n1", "n2"], options(sshd))
    assert report.error == ""
    assert report.outcome is Outcome.FIT
    assert report.backend == "gloo"
    assert report.bus_gbps is not None
    assert report.bus_gbps > 0
    assert not left_behind()


async def test_one_node_has_no_bus(sshd: Sshd, pool: SshPool) -> None:
    pytest.importorskip("torch")
    report = await all_reduce(pool, ["n1"], options(sshd))
    assert (report.outcome, report.bus_gbps, report.error) == (Outcome.FIT, None, "")


async def test_a_rank_that_dies_names_nobody_and_leaves_nothing(sshd: Sshd, pool: SshPool, shared: Path) -> None:
    python = fake_python(shared / "python", "echo broken >&2; exit 7")
    report = await all_reduce(pool, ["n1", "n2"], options(sshd, python=python, timeout=60.0))
    assert report.outcome is Outcome.UNKNOWN
    assert "n2: exit 7: broken" in report.error
    assert report.seconds < 45
    assert not left_behind()


async def test_a_rank_that_hangs_is_ended_by_the_deadline(sshd: Sshd, pool: SshPool, shared: Path) -> None:
    body = "trap '' TERM HUP; setsid sleep 300 </dev/null >/dev/null 2>&1 & sleep 300"
    report = await all_reduce(
        pool, ["n1", "n2"], options(sshd, python=fake_python(shared / "python", body), timeout=4.0)
    )
    assert report.outcome is Outcome.UNKNOWN
    assert report.bus_gbps is None
    assert report.seconds < 60
    assert not left_behind()


async def test_giving_up_leaves_nothing(sshd: Sshd, pool: SshPool, shared: Path) -> None:
    python = fake_python(shared / "python", f"touch {shared}/up; sleep 300")
    running = asyncio.create_task(all_reduce(pool, ["n1", "n2"], options(sshd, python=python)))
    await appears(shared / "up", running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not left_behind()


async def test_no_torch_is_unknown_with_the_reason(sshd: Sshd, pool: SshPool) -> None:
    report = await all_reduce(
        pool, ["n1", "n2"], options(sshd, env={"PYTHONPATH": "/nonexistent"}, python="/usr/bin/python3")
    )
    assert report.outcome is Outcome.UNKNOWN
    assert "no torch in /usr/bin/python3" in report.error


async def test_no_interpreter_is_unknown_with_the_reason(sshd: Sshd, pool: SshPool) -> None:
    report = await all_reduce(pool, ["n1", "n2"], options(sshd, python="/no/such/python"))
    assert report.outcome is Outcome.UNKNOWN
    assert "/no/such/python" in report.error


async def test_an_unreachable_node_is_unknown(sshd: Sshd, pool: SshPool) -> None:
    sshd.stop("n3")
    try:
        report = await all_reduce(pool, ["n1", "n3"], options(sshd, timeout=20.0))
    finally:
        sshd.start("n3")
    assert report.outcome is Outcome.UNKNOWN
    assert "ssh n3" in report.error
    assert not left_behind()
