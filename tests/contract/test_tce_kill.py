"""kill -9 while a checkpoint is written: what was complete stays, what is loaded is of one step, nothing piles up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("tce_kill_worker.py")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where there is one: SIGKILL loses nothing that was written, fsynced or not."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tce-", dir=base) as folder:
        yield Path(folder)


def run(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, str(WORKER), *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [line for line in lines if "crash" in line]
    return lines


def test_killed_at_every_single_write(tmp_path: Path) -> None:
    lines = run("steps", str(tmp_path / "k"))
    killed = [line for line in lines if line["killed"]]
    assert len(killed) > 60, "data, rank manifest, step manifest, link, retention: each call once before and once after"
    assert {line["step"] for line in killed} == {2, 3}
    assert [line for line in lines if line["next"] != 4] == []
    assert [line for line in lines if line["left"]] == []
    assert lines[-1]["step"] == 3
    order = [line["step"] for line in lines]
    assert order == sorted(order), "once step 3 is complete, dying later cannot lose it"


def test_two_ranks_killed_at_random_times(tmp_path: Path) -> None:
    lines = run("random", str(tmp_path / "r"), "25")
    assert [line for line in lines if line["steps"][0] != line["steps"][1]] == []
    assert [line for line in lines if line["steps"][0] < line["acknowledged"]] == []
    assert [line for line in lines if line["bad"]] == []
    assert len({line["steps"][0] for line in lines}) > 3, "the kills came at different times"
