"""A few of the kills of tests/chaos/tce_kills.py: the program, its keeper or both, at seeded random points of saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).resolve().parents[1] / "chaos" / "tce_kills.py"


@pytest.mark.parametrize(("ranks", "seeds"), [(1, 16), (2, 3)])
def test_whoever_is_killed_what_was_promised_can_be_loaded(ranks: int, seeds: int) -> None:
    command = [sys.executable, str(KILLS), f"--seeds={seeds}", f"--ranks={ranks}", f"--first={1000 * ranks}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [line for line in told if line.get("wrong", "crash")] or done.stderr[-3000:]
    assert len(told) == seeds
    assert max(line["memory"] for line in told) > 2
