"""What the launcher makes of the keepers' words."""

from __future__ import annotations

from typing import Any

import pytest

from transomd.api.wire import LauncherReport
from transomd.launch.stages import LONGEST_S, copies_trouble, holders, newest, trouble

REPORT = {"job_id": 1, "attempt": 1, "slurm_job_id": 7, "generation": 1, "host": "n1", "phase": "running", "at": 9.0}


def rank(number: int, problem: str = "", **stages: tuple[int, int, float]) -> dict[str, Any]:
    told = {stage: dict(zip(("step", "epoch", "at"), there, strict=True)) for stage, there in stages.items()}
    return {"rank": number, "stages": told, "problem": problem}


def test_a_stage_is_as_far_as_its_slowest_rank() -> None:
    told = [rank(0, memory=(8, 1, 3.0), storage=(5, 1, 2.0)), rank(1, memory=(7, 1, 4.0))]
    assert newest(told, 2) == [{"stage": "memory", "step": 7, "epoch": 1, "at": 4.0}]


def test_what_came_last_is_the_time() -> None:
    told = [rank(0, storage=(5, 1, 2.0)), rank(1, storage=(5, 1, 6.0))]
    assert newest(told, 2) == [{"stage": "storage", "step": 5, "epoch": 1, "at": 6.0}]


@pytest.mark.parametrize(
    "told",
    [
        [],
        [rank(0, memory=(8, 1, 3.0))],
        [rank(0, memory=(8, 1, 3.0)), rank(0, memory=(8, 1, 3.0))],
        [rank(0, memory=(8, 1, 3.0)), rank(1, memory=(8, 2, 3.0))],
        [rank(0, memory=(8, 1, 3.0)), rank(1)],
    ],
)
def test_what_not_every_rank_has_is_not_told(told: list[dict[str, Any]]) -> None:
    assert newest(told, 2) == []


def test_where_ranks_choose_how_often_storage_gets_a_step_the_rarest_is_told() -> None:
    measured = {"write_s": 2.5, "step_s": 0.25, "mttf_s": 1e13}
    told = [
        {**rank(number, memory=(8, 1, 3.0), storage=(5, 1, 2.0)), "every": every, "measured": why}
        for number, every, why in ((0, 4, {}), (1, 8, measured))
    ]
    memory, storage = newest(told, 2)
    assert "every" not in memory
    expected = {"stage": "storage", "step": 5, "epoch": 1, "at": 2.0, "every": 8}
    # What nobody would believe, on the other side either, is told as less.
    assert storage == {**expected, "write_s": 2.5, "step_s": 0.25, "mttf_s": LONGEST_S}
    report = LauncherReport.from_json({**REPORT, "stages": [memory, storage]})
    assert report.stages == [memory, storage]
    # Ranks of an earlier version do not say why.
    told = [{key: value for key, value in one.items() if key != "measured"} for one in told]
    assert newest(told, 2)[1] == expected


def test_trouble_names_one_rank_and_counts_the_others() -> None:
    told = {"n1": [rank(0)], "n2": [rank(2, "disk full"), rank(1, "no memory")]}
    assert trouble(told) == "rank 1 on n2: no memory (and 1 more ranks)"
    assert trouble({"n1": [rank(0, "disk full")]}) == "rank 0 on n1: disk full"
    assert trouble({"n1": [rank(0)], "n2": []}) == ""


def test_a_copy_is_as_far_as_the_newest_step_that_all_have() -> None:
    told = [rank(0, replica=(8, 1, 3.0)), rank(1, replica=(7, 1, 4.0))]
    assert newest(told, 2) == []
    assert newest(told, 2, ((1, 6), 5.0)) == [{"stage": "replica", "step": 6, "epoch": 1, "at": 5.0}]


def test_where_not_every_step_is_copied_it_is_told_how_many_are() -> None:
    told = [{**rank(number), "replica_every": 20} for number in (0, 1)]
    (copy,) = newest(told, 2, ((1, 40), 5.0))
    assert copy == {"stage": "replica", "step": 40, "epoch": 1, "at": 5.0, "every": 20}
    assert LauncherReport.from_json({**REPORT, "stages": [copy]}).stages == [copy]
    assert "every" not in newest([{**rank(0), "replica_every": 1}], 1, ((1, 40), 5.0))[0]


def copying(partner: str = "", problem: str = "", none: str = "") -> dict[str, Any]:
    return {"partner": partner, "replica_problem": problem, "no_partner": none}


def test_copies_tell_who_holds_them_and_what_is_wrong() -> None:
    told = {"n2": copying("n1", problem="n1 does not take it"), "n1": copying("n2"), "n3": copying(none="no keeper")}
    assert holders(told) == {"n1": "n2", "n2": "n1"}
    assert copies_trouble(told) == "n2: n1 does not take it (and 1 more nodes)"
    assert copies_trouble({"n1": copying(none="no other node")}) == ""
    assert copies_trouble({"n1": copying("n2"), "n2": copying("n1")}) == ""


def test_holders_come_through_the_line_as_names_only() -> None:
    report = LauncherReport.from_json({**REPORT, "copies": {"n1": "n2"}, "copies_trouble": "n1: no"})
    assert (report.copies, report.copies_trouble) == ({"n1": "n2"}, "n1: no")
    with pytest.raises(ValueError, match="copies"):
        LauncherReport.from_json({**REPORT, "copies": {"n1": "n2; rm -rf"}})


def test_it_comes_through_the_line() -> None:
    stages = newest([rank(0, memory=(8, 1, 3.0))], 1)
    report = LauncherReport.from_json({**REPORT, "stages": stages, "checkpoint_trouble": "x\x1b[2J"})
    assert report.stages == stages
    assert "\x1b" not in report.checkpoint_trouble
    assert LauncherReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "stage",
    [{"stage": "moon"}, {"step": -1}, {"epoch": 1 << 62}, {"at": float("nan")}, {"every": "often"}, {"write_s": -1.0}],
)
def test_what_is_no_stage_is_refused(stage: dict[str, Any]) -> None:
    good = {"stage": "memory", "step": 1, "epoch": 1, "at": 1.0}
    with pytest.raises(ValueError, match=next(iter(stage))):
        LauncherReport.from_json({**REPORT, "stages": [{**good, **stage}]})
