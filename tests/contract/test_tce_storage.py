"""Real file systems that refuse: full, forbidden, read-only. And a hundred saves in the memory of one."""

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

WORKER = Path(__file__).with_name("tce_storage_worker.py")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@pytest.fixture(scope="module")
def scenes() -> Iterator[dict[str, dict[str, Any]]]:
    """What happened in each scene; the mounts are private to the worker and end with it."""
    # Not below pytest's own folders, which an ordinary user may not enter; in memory, to spare the disk.
    with tempfile.TemporaryDirectory(prefix="tce-", dir="/dev/shm") as folder:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(WORKER), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        yield {line["scene"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_a_full_disk_names_the_bytes_and_harms_nothing(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["full"]
    for error in scene["errors"]:
        assert "No space left on device: needs 1258" in error
        assert "bytes free | free space on the file system" in error
    assert (scene["step"], scene["right"]) == (1, True)
    assert scene["used"] < 7 << 20, "nothing of the failed saves is left"
    assert scene["after"] == ""
    assert scene["failed"] == 2


def test_a_forbidden_directory_can_be_loaded_from_and_says_why_not_more(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["forbidden"]
    assert "Permission denied" in scene["error"]
    assert "check the owner and the mode" in scene["error"]
    assert (scene["step"], scene["failed"]) == (1, 1)


def test_a_read_only_file_system_does_not_keep_the_program_from_going_on(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["read_only"]
    assert "Read-only file system" in scene["error"]
    assert (scene["step"], scene["failed"]) == (1, 1)


def test_a_hundred_saves_take_no_more_memory_than_ten(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["many"]
    assert max(scene["sizes"][1:]) - scene["sizes"][0] < 4
    assert scene["left"] == [99, 89], "the newest, and the one that was loaded last"
    assert scene["open"] < 12
