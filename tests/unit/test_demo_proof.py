"""The demo's proof and timeline, which must be able to fail."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("demo_follow")


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("demo_report")


def seen(follow: ModuleType, *runs: range, total: int = 6) -> Any:
    """What is seen of a job whose launches did these steps, each with the loss that was expected."""
    found = follow.Seen(total, expected={n: float(n).hex() for n in range(1, total + 1)})
    for epoch, steps in enumerate(runs, 1):
        found.steps += [follow.Step(epoch, n, float(n), float(n).hex(), 1.0, 100.0 * epoch + n) for n in steps]
    return found


def test_it_holds_when_every_loss_is_equal_also_of_steps_done_twice(follow: ModuleType, reporting: ModuleType) -> None:
    proof = reporting.proof(seen(follow, range(1, 5), range(3, 7)))
    assert proof.holds
    assert (proof.equal, proof.twice) == (6, (3, 4))


def test_one_bit_in_one_of_two_computations_breaks_it(follow: ModuleType, reporting: ModuleType) -> None:
    found = seen(follow, range(1, 5), range(3, 7))
    lost = found.steps[3]
    bits = (4.0 + 2**-50).hex()
    found.steps[3] = follow.Step(lost.epoch, lost.step, lost.loss, bits, lost.took_s, lost.at)
    proof = reporting.proof(found)
    assert not proof.holds
    assert proof.different == (4,)
    assert set(proof.sample[4][1].split(" / ")) == {(4.0).hex(), bits}


def test_a_step_that_was_not_done_or_not_expected_breaks_it(follow: ModuleType, reporting: ModuleType) -> None:
    assert reporting.proof(seen(follow, range(1, 4), range(5, 7))).missing == (4,)
    found = seen(follow, range(1, 7))
    del found.expected[2]
    assert reporting.proof(found).missing == (2,)
    assert not reporting.proof(found).holds
    assert not reporting.proof(follow.Seen(0)).holds


def test_steps_that_are_read_together_are_placed_one_after_the_other(follow: ModuleType) -> None:
    line = "step {0} loss 2.5 loss_hex 0x1.4p+1 time 0.50s"
    lines = [follow._STEP.search(line.format(n)) for n in (1, 2, 3)]
    assert [(step.step, step.at) for step in follow._steps(1, lines, 10.0)] == [(1, 9.0), (2, 9.5), (3, 10.0)]


def test_the_strip_shows_new_steps_the_fault_the_gap_and_steps_done_again(
    follow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    show = importlib.import_module("demo_show")
    found = follow.Seen(6, cut_at=3.5)
    done = [(1, 1, 1.0), (1, 2, 2.0), (1, 3, 3.0), (2, 3, 7.0), (2, 4, 8.0), (2, 5, 9.0), (2, 6, 10.0)]
    found.steps = [follow.Step(epoch, n, 0.0, "", 1.0, at) for epoch, n, at in done]
    text = show.strip(found, 0.0, 1.0, 12, show.ASCII)
    assert text.plain == "###x..####.."
    styles = [str(span.style) for span in text.spans]
    assert styles == ["green"] * 3 + ["bold red"] + ["red"] * 2 + ["yellow"] + ["green"] * 3 + ["dim"] * 2
