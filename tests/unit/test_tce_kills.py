"""A few of the kills of tests/chaos/tce_kills.py, at seeded random points of saves and copies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).resolve().parents[1] / "chaos" / "tce_kills.py"


@pytest.mark.parametrize(("kind", "seeds"), [("alone", 10), ("peers", 6), ("direct", 2)])
def test_whoever_is_killed_what_was_promised_can_be_loaded(kind: str, seeds: int) -> None:
    command = [sys.executable, str(KILLS), f"--seeds={seeds}", f"--kind={kind}", "--first=1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [line for line in told if line.get("wrong", "crash")] or done.stderr[-3000:]
    assert len(told) == seeds
    assert max(line["loaded"][0] for line in told) > 2
