"""What a user can make a kernel log say must not make a node unfit: only lines that the kernel itself begins count."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from transomd.health import kernel, probe
from transomd.words import Outcome

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
NOW = time.time()


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S,000000+00:00", time.gmtime(at))


def kernel_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: str, log: str = "") -> dict[str, Any]:
    """What the probe makes of a dmesg that prints ``ring`` and a kern.log that holds ``log``."""
    (tmp_path / "kern.log").write_text(log)
    monkeypatch.setattr(probe, "command", lambda argv: (0, ring))
    monkeypatch.setattr(probe, "boot_time", lambda: NOW - 7200)
    return {"kernel": probe.part_kernel({"window": 86400.0, "kernel_logs": [str(tmp_path / "kern.log")]})}


def xid(facts: dict[str, Any], cleared_at: float = 0.0) -> Outcome:
    return kernel.fatal(facts["kernel"], cleared_at).outcome


def test_the_kernels_own_line_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert xid(kernel_facts(tmp_path, monkeypatch, f"{stamp(NOW - 60)} {XID}\n")) is Outcome.UNFIT


@pytest.mark.parametrize(
    "line",
    [
        f"tmpfs: Unknown parameter '{XID}'",
        f"tmpfs: Unknown parameter 'evil\n                                 {XID}'",
        f"tmpfs: Unknown parameter 'evil\u2028{stamp(NOW - 5)} {XID}'",
        f"tmpfs: Unknown parameter 'evil\r{stamp(NOW - 5)} {XID}'",
        f"NVRM: Xid (PCI:[4711]: segfault at 0 ip 0 sp 0 error 4 in {XID}",
        "x: NVRM: RmInitAdapter failed!",
    ],
)
def test_what_the_kernel_quotes_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    facts = kernel_facts(tmp_path, monkeypatch, f"{stamp(NOW - 60)} {line}\n")
    assert xid(facts) is Outcome.FIT


def test_a_line_in_the_log_alone_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may write ``<0>kernel: NVRM: ...`` to /dev/log."""
    written = time.strftime("%b %d %H:%M:%S", time.localtime(NOW - 60))
    facts = kernel_facts(tmp_path, monkeypatch, f"{stamp(NOW - 60)} quiet\n", f"{written} n1 kernel: {XID}\n")
    assert [event["sources"] for event in facts["kernel"]["events"]] == [[str(tmp_path / "kern.log")]]
    assert xid(facts) is Outcome.UNKNOWN


def test_a_log_cannot_renew_what_a_person_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = time.strftime("%b %d %H:%M:%S", time.localtime(NOW - 5))
    facts = kernel_facts(tmp_path, monkeypatch, f"{stamp(NOW - 3000)} {XID}\n", f"{written} n1 kernel: {XID}\n")
    assert xid(facts) is Outcome.UNFIT
    assert xid(facts, cleared_at=NOW - 1000) is Outcome.FIT
