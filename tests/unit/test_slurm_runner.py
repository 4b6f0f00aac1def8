"""The runner kills what is late, bounds what is said, and gives up every right it should; tried on real processes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from transom_slurm import runner
from transom_slurm.runner import (
    CommandNotStarted,
    CommandOverflow,
    CommandTimeout,
    clean_env,
    run,
    scrub,
    user_identity,
)

ENV = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except FileNotFoundError:
        return False


async def _gone(pid: int) -> bool:
    for _ in range(6000):
        if not _alive(pid):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_output_input_and_exit_code_come_through() -> None:
    done = await run(["sh", "-c", "cat; echo oops >&2; exit 3"], stdin="héllo\n", env=ENV, timeout=60)
    assert (done.rc, done.stdout, done.stderr) == (3, "héllo\n", "oops\n")
    assert done.argv[0] == "sh"
    assert 0 < done.seconds < 60


async def test_a_signal_is_a_negative_exit_code() -> None:
    done = await run(["sh", "-c", "kill -9 $$"], env=ENV, timeout=60)
    assert (done.rc, done.end) == (-9, "killed by SIGKILL")
    realtime = await run(["sh", "-c", "kill -40 $$"], env=ENV, timeout=60)
    assert realtime.end == "killed by signal 40"
    assert (await run(["sh", "-c", "exit 2"], env=ENV, timeout=60)).end == "exit code 2"


async def test_bytes_that_are_no_text_survive() -> None:
    done = await run(["printf", r"\377\n"], env=ENV, timeout=60)
    assert done.stdout.encode("utf-8", "surrogateescape") == b"\xff\n"


async def test_input_that_nobody_reads_is_no_error() -> None:
    done = await run(["sh", "-c", "exec <&-; echo ok"], stdin="x" * 1_000_000, env=ENV, timeout=60)
    assert done.stdout == "ok\n"


async def test_the_deadline_kills_the_whole_group_even_what_ignores_sigterm(tmp_path: Path) -> None:
    script = f"trap '' TERM; sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/child; sleep 60' & wait"
    began = time.monotonic()
    with pytest.raises(CommandTimeout, match=r"sh: no end within 2 s"):
        await run(["sh", "-c", script], env=ENV, timeout=2)
    assert time.monotonic() - began < 30
    assert await _gone(int((tmp_path / "child").read_text()))


async def test_a_group_that_heeds_sigterm_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TERM_GRACE_S", 60.0)
    began = time.monotonic()
    with pytest.raises(CommandTimeout):
        await run(["sleep", "60"], env=ENV, timeout=0.2)
    assert time.monotonic() - began < 40


async def test_cancelling_the_caller_kills_the_command(tmp_path: Path) -> None:
    task = asyncio.create_task(run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], env=ENV, timeout=60))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _gone(int((tmp_path / "pid").read_text()))


async def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "OUTPUT_LIMIT", 100_000)
    with pytest.raises(CommandOverflow, match="more than 100000 bytes"):
        await run(["yes"], env=ENV, timeout=60)


async def test_what_cannot_be_executed_certainly_did_nothing() -> None:
    with pytest.raises(CommandNotStarted, match="No such file"):
        await run(["no-such-program"], env=ENV, timeout=60)
    with pytest.raises(CommandNotStarted):
        await run(["true"], env=ENV, timeout=60, cwd="/no/such/folder")


@as_root
async def test_another_user_has_exactly_that_users_rights() -> None:
    nobody = user_identity("nobody")
    said = await run(["sh", "-c", "id -u; id -g; id -G; umask; pwd"], env=ENV, timeout=60, cwd="/tmp", user=nobody)
    assert said.stdout.split() == [str(nobody.uid), str(nobody.gid), *map(str, nobody.groups), "0022", "/tmp"]
    assert 0 not in nobody.groups


@as_root
async def test_a_folder_that_the_user_may_not_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir(mode=0o700)
    with pytest.raises(CommandNotStarted, match="Permission denied"):
        await run(["pwd"], env=ENV, timeout=60, cwd=str(tmp_path / "secret"), user=user_identity("nobody"))


def test_identities_come_from_the_name_service() -> None:
    root = user_identity(0)
    assert (root.name, root.uid, user_identity("root")) == ("root", 0, root)
    with pytest.raises(KeyError):
        user_identity("nobody-of-this-name")


def test_queries_see_nothing_of_an_allocation_or_of_habits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SQUEUE_FORMAT", "SBATCH_REQUEUE", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    env = clean_env()
    assert set(env) == {"PATH", "LC_ALL", "SLURM_TIME_FORMAT", "SLURM_CONF"}
    assert env["SLURM_CONF"] == "/etc/other.conf"
    assert clean_env({"A": "b"}, slurm_conf="/x")["SLURM_CONF"] == "/x"


def test_a_users_environment_is_scrubbed_of_other_allocations() -> None:
    env = {"HOME": "/h", "SLURM_CPU_BIND": "x", "SBATCH_ARRAY_INX": "1-9", "SLURM_CONF": "/c", "PMIX_RANK": "0"}
    assert scrub(env) == {"HOME": "/h", "SLURM_CONF": "/c"}
