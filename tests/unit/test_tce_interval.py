"""How often storage gets a step: by the formulas, by measure, and the same steps on all ranks."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import Node, nodes, on

from transomd.launch.program import LaunchPlan, program_env
from transomd.spec import JobSpec
from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.environment import from_environment
from transomd.tce.interval import NODE_MTTF_S, daly_s, interval_s, job_mttf_s, settled
from transomd.tce.schedule import CHOSEN, NODE_MTTF, Auto, Fixed, every_of, schedule_of

DAY_S, HOUR_S = 86400.0, 3600.0


@pytest.mark.parametrize(("nodes_", "worse", "better"), [(8, 462, 1282), (64, 57.7, 160), (512, 7.2, 20)])
def test_the_mttf_of_jobs_of_two_clusters(nodes_: int, worse: float, better: float) -> None:
    assert job_mttf_s(nodes_) / HOUR_S == pytest.approx(worse, rel=0.01)
    assert job_mttf_s(nodes_, DAY_S / 2.34e-3) / HOUR_S == pytest.approx(better, rel=0.01)


@pytest.mark.parametrize(
    ("mttf_h", "cost_s", "minutes"),
    [
        *((462, 120, 333), (1282, 120, 555), (462, 10, 96), (1282, 10, 160), (462, 1, 30), (1282, 1, 51)),
        *((57.7, 120, 118), (57.7, 10, 34), (57.7, 1, 11), (7.2, 120, 42), (7.2, 10, 12), (20, 1, 6)),
    ],
)
def test_worked_intervals_of_the_first_order(mttf_h: float, cost_s: float, minutes: float) -> None:
    """By Young's formula, which the table of the second paper follows; the correction is small at such ratios."""
    assert daly_s(cost_s, mttf_h * HOUR_S) / 60 == pytest.approx(minutes, rel=0.06)


def lost(interval: float, cost: float, mttf: float) -> float:
    """Wall-clock time per second of training, by Daly's complete model (restarts take no time)."""
    return mttf * (math.exp((interval + cost) / mttf) - 1) / interval


@pytest.mark.parametrize("ratio", [1e-5, 1e-3, 0.01, 0.1, 0.3])
def test_no_other_interval_loses_less(ratio: float) -> None:
    """Against the model itself, of which the formula approximates the minimum."""
    mttf = 50_000.0
    cost = ratio * mttf
    chosen = lost(daly_s(cost, mttf), cost, mttf)
    best = min(lost(mttf * 1.02**power, cost, mttf) for power in range(-500, 50))
    assert chosen == pytest.approx(best, rel=1e-3)


def test_bounds() -> None:
    assert daly_s(200.0, 100.0) == daly_s(1e9, 100.0) == 100.0
    assert daly_s(199.0, 100.0) <= 100.0
    assert interval_s(1000.0, 100.0) == 1000.0, "no more often than it can be done"
    assert interval_s(10.0, 57.7 * HOUR_S) == daly_s(10.0, 57.7 * HOUR_S)


@pytest.mark.parametrize(
    ("current", "wanted", "found"),
    [
        *((1, 0.0, 1), (1, 2.4, 1), (1, 2.6, 2), (1, 1000.0, 512), (64, 64.0, 64), (64, 127.0, 64)),
        *((64, 52.0, 64), (64, 51.0, 32), (64, 159.0, 64), (64, 161.0, 128), (64, 3.0, 2), (64, 0.5, 1)),
    ],
)
def test_it_changes_only_when_it_is_well_off(current: int, wanted: float, found: int) -> None:
    assert settled(current, wanted) == found


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(auto: Auto, clock: Clock, steps: range, step_s: float, busy_s: float) -> list[int]:
    """Steps that storage gets when each takes ``step_s`` and a write ``busy_s``."""
    found = []
    for step in steps:
        auto.saves(step)
        if auto.due(step):
            found.append(step)
            auto.took(busy_s)
        clock.now += step_s
    return found


def test_the_first_step_is_stored_and_then_by_the_formula(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "transom.tce")
    clock = Clock()
    auto = Auto(57.7 * HOUR_S, clock)
    found = run(auto, clock, range(1, 5000), 2.0, 10.0)
    # 34 minutes are 1013 steps of two seconds.
    assert found == [1, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608]
    assert [record.getMessage() for record in caplog.records] == [
        "storage gets the first step that is saved in every 512 (chosen by measure): a write takes 10.00 s, "
        "a step 2.00 s, and the job's MTTF is 57.70 h"
    ]
    run(auto, clock, range(5000, 20000), 2.0, 100.0)
    assert auto.every == 2048
    assert len(caplog.records) >= 2
    assert auto.told()["every"] == 2048
    assert auto.told()["measured"] == pytest.approx({"write_s": 100.0, "step_s": 2.0, "mttf_s": 57.7 * HOUR_S})
    # A step that cannot be stored for long stays due, however many are saved meanwhile.
    assert auto.told()["due"][-3:] == [14336, 16384, 18432]
    assert auto.due(14336)


def test_without_a_completed_step_storage_gets_every_one() -> None:
    auto = Auto(HOUR_S)
    for step in range(1, 100):
        auto.saves(step)
        assert auto.due(step)
    assert auto.told()["measured"] == {}


def test_steps_that_no_power_of_two_divides_are_stored_too() -> None:
    clock = Clock()
    found = run(Auto(57.7 * HOUR_S, clock), clock, range(1, 100_000, 100), 200.0, 10.0)
    assert found[:4] == [1, 601, 1101, 1601]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_measure_differently_still_store_common_steps(seed: int) -> None:
    """What the rank with the longest windows stores, all store, whenever each changes its mind."""
    dice = random.Random(seed)
    clock = Clock()
    ranks = [Auto(DAY_S, clock) for _ in range(4)]
    step, common = 0, 0
    for _ in range(1000):
        step += dice.choice([1, 1, 1, 3, 7])
        clock.now += dice.uniform(0.5, 20)
        for rank in ranks:
            rank.saves(step)
        longest = max(ranks, key=lambda rank: rank.every)
        if longest.due(step):
            common += 1
            assert all(rank.due(step) for rank in ranks)
        for rank in ranks:
            if dice.random() < 0.05:
                rank.took(dice.choice([0.1, 1.0, 30.0]))
    assert common > 3


def test_a_step_is_decided_once_also_where_it_is_asked_again_later() -> None:
    auto = Auto(HOUR_S)
    for step in (5, 6, 5, 6, -1):
        auto.saves(step)
    assert auto.told()["due"] == [5, 6]
    assert not auto.due(-1)


def test_what_the_environment_says() -> None:
    found = schedule_of(CHOSEN, {"NNODES": "8", NODE_MTTF: "40h"})
    assert isinstance(found, Auto)
    clock = Clock()
    five_hours = Auto(5 * HOUR_S, clock)
    run(five_hours, clock, range(1, 200), 1.0, 10.0)
    assert five_hours.every == 512
    assert found._mttf_s == 5 * HOUR_S
    for environ in ({}, {NODE_MTTF: "often"}, {NODE_MTTF: "0"}, {"NNODES": "1:4"}):
        plain = schedule_of(CHOSEN, environ)
        assert isinstance(plain, Auto)
        assert plain._mttf_s == NODE_MTTF_S
    fixed = schedule_of(4, {})
    assert isinstance(fixed, Fixed)
    assert [step for step in range(1, 10) if fixed.due(step)] == [4, 8]


def test_what_can_be_said() -> None:
    assert (every_of("auto"), every_of(3)) == (CHOSEN, 3)
    for wrong in ("often", 0):
        with pytest.raises(CheckpointError, match="storage_every is"):
            every_of(wrong)  # type: ignore[arg-type]
    told = {"TRANSOM_CHECKPOINT_DIR": "/x", "TRANSOM_CHECKPOINT_STORAGE_EVERY": "auto"}
    assert from_environment(told, {})["storage_every"] == "auto"
    with pytest.raises(CheckpointError, match="not a whole number"):
        from_environment({**told, "TRANSOM_CHECKPOINT_STORAGE_EVERY": "often"}, {})


def job(**checkpoint: Any) -> JobSpec:
    return JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint=checkpoint)


def env_of(spec: JobSpec) -> dict[str, str]:
    plan = LaunchPlan(
        job_id=1, attempt=1, epoch=1, nodes=("a", "b"), resume_step=None, master_port=1, spec=spec, env={}
    )
    return program_env(plan, {})


def test_a_job_s_file_hands_it_on() -> None:
    spec = JobSpec.from_stored(job(storage_every="auto", node_mttf="40d").model_dump(mode="json"))
    env = env_of(spec)
    assert env["TRANSOM_CHECKPOINT_STORAGE_EVERY"] == "auto"
    found = schedule_of(every_of("auto"), env)
    assert isinstance(found, Auto)
    assert found._mttf_s == 20 * DAY_S
    plain = env_of(job(storage_every="8"))
    assert (plain["TRANSOM_CHECKPOINT_STORAGE_EVERY"], plain[NODE_MTTF]) == ("8", "")
    for wrong in ("often", 0, True):
        with pytest.raises(ValueError, match="number of steps of at least 1, or `auto`"):
            job(storage_every=wrong)


# --- on real keepers --------------------------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def engines(directory: Path, found: list[Node], **settings: Any) -> list[CheckpointEngine]:
    """One rank a node."""
    made = []
    for rank, node in enumerate(found):
        on(node)
        told = {"rank": rank, "world_size": len(found), "epoch": 1, "keep": 100, **settings}
        made.append(CheckpointEngine(directory, **told))
    return made


def save(found: list[Node], ranks: list[CheckpointEngine], step: int) -> list[Any]:
    handles = []
    for node, engine in zip(found, ranks, strict=True):
        on(node)
        handles.append(engine.save(step, {"x": torch.full((1000,), float(step)), "step": step}))
    return handles


def complete(directory: Path) -> list[int]:
    return sorted(one.step for one in list_checkpoints(directory) if one.complete)


def stored(node: Node) -> dict[str, Any]:
    (rank,) = node.status()["ranks"]
    return {"step": rank["stages"].get("storage", {}).get("step"), "every": rank["every"], "why": rank["measured"]}


def test_two_ranks_store_the_first_step_and_what_is_left_at_the_end(directory: Path) -> None:
    with nodes(directory.parent, 2) as found:
        ranks = engines(directory, found, storage_every="auto")
        for handle in save(found, ranks, 1):
            handle.wait(timeout=60)
        # Writes take next to nothing, so it is long until the next one is worth it.
        for step in range(2, 8):
            handles = save(found, ranks, step)
        assert all(schedule(engine).every > 8 for engine in ranks)
        told = [{"step": 1, "every": schedule(engine).every, "why": why(engine)} for engine in ranks]
        assert wait_for(lambda: [stored(node) for node in found] == told)
        for handle in handles:
            with pytest.raises(CheckpointError, match="chosen by measure"):
                handle.wait(timeout=60)
        assert complete(directory) == [1]
        for engine in ranks:
            engine.close(0)
        assert wait_for(lambda: complete(directory) == [1, 7])
        assert all(engine.skipped == engine.failed == 0 for engine in ranks)


def why(engine: CheckpointEngine) -> dict[str, float]:
    measured = schedule(engine).measured
    assert measured is not None
    assert measured.mttf_s == NODE_MTTF_S
    return measured._asdict()


def schedule(engine: CheckpointEngine) -> Auto:
    assert engine._memory is not None
    found = engine._memory.ledger.schedule
    assert isinstance(found, Auto)
    return found


def test_a_write_takes_until_the_last_rank_has_written(directory: Path) -> None:
    """Else a rank that writes little would choose shorter windows than one that writes much."""
    with nodes(directory.parent, 2) as found:
        ranks = engines(directory, found, storage_every="auto")
        (first,) = save(found[:1], ranks[:1], 1)
        assert wait_for(lambda: not first.done() and ranks[0].saved == 1)
        written = time.monotonic()
        assert not wait_for(first.done, 0.5)
        late = time.monotonic() - written
        (second,) = save(found[1:], ranks[1:], 1)
        for handle in (first, second):
            handle.wait(timeout=60)
        assert schedule(ranks[0])._costs[0] > late >= 0.5
        for engine in ranks:
            engine.close(0)


def test_a_rank_with_longer_windows_joins_what_another_has_begun(directory: Path) -> None:
    with nodes(directory.parent, 2) as found:
        ranks = engines(directory, found, storage_every="auto")
        for handle in save(found, ranks, 1):
            handle.wait(timeout=60)
        for engine, every in zip(ranks, (8, 4), strict=True):
            tuned = schedule(engine)
            tuned.every = every
            tuned._choose = lambda: None  # type: ignore[method-assign]
        for step in range(2, 6):
            save(found, ranks, step)
            # The folder of a step that one rank has begun is there at once; the other looks with its next save.
            assert step != 4 or wait_for(lambda: (directory / "step-000000004.epoch-000001").is_dir(), 60)
        assert wait_for(lambda: complete(directory) == [1, 4])
        for step in range(6, 9):
            last = save(found, ranks, step)
        for handle in last:
            handle.wait(timeout=60)
        assert complete(directory) == [1, 4, 8]
        for engine in ranks:
            engine.close(0)


def test_another_keeper_hears_which_steps_are_due(directory: Path) -> None:
    """What was staged and not stored when the keeper died is stored by the next one, and nothing else."""
    with nodes(directory.parent, 1) as (node,):
        (engine,) = engines(directory, [node], storage_every="auto")
        save([node], [engine], 1)[0].wait(timeout=60)
        tuned = schedule(engine)
        tuned.every = 4
        tuned._choose = lambda: None  # type: ignore[method-assign]
        save([node], [engine], 3)
        blocked = directory / "step-000000004.epoch-000001"
        blocked.write_text("in the way of the folder")
        (handle,) = save([node], [engine], 4)
        assert wait_for(lambda: bool(node.status()["ranks"][0]["problem"]))
        node.kill()
        blocked.unlink()
        node.start()
        handle.wait(timeout=60)
        assert complete(directory) == [1, 4]
        engine.close(0)
