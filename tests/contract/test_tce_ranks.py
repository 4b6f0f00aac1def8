"""Two real ranks with torch.distributed: they agree, whatever one of them finds damaged or missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("tce_ranks_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw and logged, by scene."""
    folder = tmp_path_factory.mktemp("ranks")
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return {line["scene"]: line["ranks"] for line in map(json.loads, outputs[0][0].splitlines())}


def saw(scenes: dict[str, list[dict[str, Any]]], name: str) -> list[Any]:
    return [rank["saw"] for rank in scenes[name]]


def test_both_load_the_newest(scenes: dict[str, list[dict[str, Any]]]) -> None:
    assert saw(scenes, "everything_is_fine") == [{"step": 2, "right": True, "epoch": 1}] * 2


def test_both_go_to_the_older_one_when_one_has_a_damaged_file(scenes: dict[str, list[dict[str, Any]]]) -> None:
    assert saw(scenes, "one_rank_has_a_damaged_file") == [{"step": 1, "right": True}] * 2
    for rank in scenes["one_rank_has_a_damaged_file"]:
        assert any("rank-00001.safetensors: tensor mine is damaged" in line for line in rank["told"])


def test_only_what_every_rank_sees_counts(scenes: dict[str, list[dict[str, Any]]]) -> None:
    assert saw(scenes, "one_rank_does_not_see_the_newest") == [{"step": 1, "right": True}] * 2


def test_no_start_from_the_beginning_when_one_rank_sees_nothing(scenes: dict[str, list[dict[str, Any]]]) -> None:
    errors = [rank["error"] for rank in saw(scenes, "one_rank_sees_nothing")]
    assert all("rank 0 sees step-000000001.epoch-000001, not every other rank does" in error for error in errors)


def test_both_refuse_when_all_are_damaged(scenes: dict[str, list[dict[str, Any]]]) -> None:
    errors = [rank["error"] for rank in saw(scenes, "all_are_damaged")]
    assert all("none can be loaded" in error and "replica-00000.pt" in error for error in errors)


def test_ranks_agree_on_an_epoch_and_the_older_start_is_fenced(scenes: dict[str, list[dict[str, Any]]]) -> None:
    for rank in saw(scenes, "a_start_after_a_start"):
        assert rank["epochs"] == [1, 2]
        assert rank["step"] == 1
        assert "epoch 1 is fenced: epoch 2 has started since" in rank["late"]
        assert rank["right"] == {"step": 2, "right": True}


def test_rank_and_world_size_come_from_the_group(scenes: dict[str, list[dict[str, Any]]]) -> None:
    places = [rank["place"] for rank in saw(scenes, "from_the_environment")]
    assert places == [[0, 2], [1, 2]]
    assert [rank["found"] for rank in saw(scenes, "from_the_environment")] == [[5, 7, 2, True]] * 2
