"""What sinfo tells of a job's room before it waits for ever; the sinfo here is a script that answers as recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import Recorded, a_job, serving, transom
from transom_cli.room import partitions, remarks

from transomd.spec import JobSpec

SINFO = "main*|up|1:00:00|1-4|1/3/2/6\nbig|up|infinite|1-infinite|0/100/0/100\nold|drain|infinite|1-infinite|0/9/0/9\n"


def said(**asked: Any) -> list[str]:
    return remarks(JobSpec.from_stored({"name": "x", "command": "x", "nodes": 1, **asked}), partitions(SINFO))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"nodes": 40}, "40 nodes are asked for, and partition main has 6 in all; Slurm may never start it"),
        ({"nodes": 4, "spares": 3}, "7 nodes are asked for (4 and 3 spare), and partition main has 6 in all"),
        ({"nodes": 5}, "5 nodes are asked for, and partition main gives a job 4 at most"),
        ({"time_limit": "2:00:00"}, "time_limit is 2h00m, and partition main allows 1h00m"),
        ({"partition": "old"}, "partition old is drain, and starts no job until"),
    ],
)
def test_what_keeps_a_job_waiting(asked: dict[str, Any], expected: str) -> None:
    (line,) = said(**asked)
    assert line.startswith(expected)


def test_nodes_that_are_away() -> None:
    text = SINFO.replace("1-4|1/3/2/6", "1-infinite|1/3/2/6")
    spec = JobSpec.from_stored({"name": "x", "command": "x", "nodes": 5})
    (line,) = remarks(spec, partitions(text))
    assert line.endswith("2 of the 6 of partition main are out of service: it waits (sinfo -R)")


def test_a_job_that_one_partition_can_start_is_not_spoken_of() -> None:
    assert said(nodes=4) == []
    assert said(nodes=40, partition="main,big") == []
    assert len(said(nodes=101, partition="main,big")) == 2
    assert said(nodes=40, partition="unknown") == []


@pytest.mark.parametrize("text", ["", "\n", "main*|up", "main*|up|soon|1-4|1/2/3/6", "main*|up|infinite|1-4|1/2/3"])
def test_what_cannot_be_read_says_nothing(text: str) -> None:
    assert partitions(text) == []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        recorded.on("POST /v1/jobs", (201, {"job": a_job(state="submitted")}))
        yield recorded


@pytest.mark.parametrize(("script", "lines"), [(f"printf '{SINFO}'", 1), ("exit 1", 0)])
def test_submit_says_so_at_once(server: Recorded, tmp_path: Path, script: str, lines: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sinfo").write_text(f"#!/bin/sh\n{script.replace(chr(10), chr(92) + 'n')}\n")
    (tmp_path / "bin" / "sinfo").chmod(0o755)
    (tmp_path / "job.yaml").write_text("name: demo\nnodes: 40\ncommand: python train.py\n")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path, PATH=path)
    assert done.returncode == 0
    assert done.stderr.count("partition main has 6 in all") == lines
