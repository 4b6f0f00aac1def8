"""Probing nodes over a real sshd."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from health_sshd import Sshd

from transomd.health.checker import ProbeOptions, probe, probe_each, probe_node
from transomd.health.profile import Profile
from transomd.health.ssh import SshPool
from transomd.health.types import NodeReport
from transomd.words import CheckMode, Outcome

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="logs in as root")

NODE = Profile(disk_free_min=0.0, inodes_free_min=0.0, modes=dict.fromkeys(("xid", "xid-reset"), CheckMode.OFF))
"""A profile that the machine under test meets whatever its disk and its kernel say."""


def fake_python(path: Path, body: str) -> ProbeOptions:
    path.write_text("#!/bin/sh\ncat > /dev/null\n" + body)
    path.chmod(0o755)
    return ProbeOptions(python=str(path), deadline=1.0)


async def test_reports_of_all_nodes_and_each_as_it_comes(sshd: Sshd, pool: SshPool) -> None:
    sshd.stop("n2")
    seen: list[NodeReport] = []
    try:
        reports = await probe(pool, ["n1", "n2", "n3", "n1"], NODE, on_report=seen.append, clock=lambda: 7.0)
    finally:
        sshd.start("n2")
    assert set(reports) == {"n1", "n2", "n3"}
    assert seen[0].node == "n2"
    assert (reports["n2"].reached, reports["n2"].outcome) == (False, Outcome.UNKNOWN)
    assert "connection refused" in reports["n2"].error
    for node in ("n1", "n3"):
        assert reports[node].outcome is Outcome.FIT, reports[node].results
        assert reports[node].at == 7.0
        assert reports[node].facts["uid"] == 0


async def test_the_clock_is_compared_with_the_head(pool: SshPool) -> None:
    report = await probe_node(pool, "n1", NODE)
    (clock,) = [result for result in report.results if result.check == "clock"]
    low, _, high, _ = clock.value.split()
    assert float(low) <= 0.01
    assert float(high) >= -0.01


@pytest.mark.parametrize("body", ["echo not json", "echo '[1]'", "exit 3", "head -c 2000000 /dev/zero", "echo"])
async def test_a_probe_that_fails_is_unknown(pool: SshPool, tmp_path: Path, body: str) -> None:
    report = await probe_node(pool, "n1", NODE, fake_python(tmp_path / "python", body))
    assert (report.reached, report.outcome, report.results) == (False, Outcome.UNKNOWN, ())
    assert "probe.py" in report.error


async def test_noise_before_the_answer_is_ignored(pool: SshPool, tmp_path: Path) -> None:
    body = f"echo Welcome; exec {sys.executable} -c 'print(chr(123) + chr(125))'"
    report = await probe_node(pool, "n1", NODE, fake_python(tmp_path / "python", body))
    assert report.reached
    assert report.outcome is Outcome.UNKNOWN


async def test_a_probe_that_hangs_is_unknown_in_time(pool: SshPool, tmp_path: Path) -> None:
    began = time.monotonic()
    report = await probe_node(pool, "n1", NODE, fake_python(tmp_path / "python", "trap '' TERM; sleep 60"))
    assert time.monotonic() - began < 40
    assert (report.reached, report.outcome) == (False, Outcome.UNKNOWN)


async def test_leaving_early_ends_the_other_probes(pool: SshPool) -> None:
    each = probe_each(pool, ["n1", "n2", "n3"], NODE)
    first = await anext(each)
    await each.aclose()
    assert first.node in {"n1", "n2", "n3"}
    assert (await probe_node(pool, "n2", NODE)).reached
