"""A drain by hand of a node that is drained already says by whom, since when and why."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tol_world import SimWorld

from transomd.tol.manual import Hands


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    made = SimWorld()
    await made.start_daemon()
    await made.run(5)
    yield made
    await made.close()


def hands_of(world: SimWorld) -> Hands:
    assert world.operator is not None
    return Hands(world.operator, world.settings, world.slurm.clock, "http://x")


@pytest.mark.parametrize("dry_run", [False, True])
async def test_transom_has_drained_it_already(world: SimWorld, dry_run: bool) -> None:
    hands = hands_of(world)
    (first,) = await hands.drain(["n1"], "transom[manual] ann: fan", dry_run=False)
    assert (first["done"], first["message"]) == (True, "drained")
    (again,) = await hands.drain(["n1"], "transom[manual] bob: rack", dry_run=dry_run)
    assert again["done"]
    assert again["message"].startswith("drained already, by transom on 20")
    assert again["message"].endswith(": transom[manual] ann: fan")
    assert world.drained() == ["n1"]


async def test_a_person_has_drained_it(world: SimWorld) -> None:
    world.slurm.drain_by_person("n2", "rack move")
    (told,) = await hands_of(world).drain(["n2"], "transom[manual] ann: fan", dry_run=False)
    assert not told["done"]
    assert told["message"].startswith("alice drained it on 20")
    assert told["message"].endswith(": rack move; left as it is")
    (back,) = await hands_of(world).undrain(["n2"], "ann", dry_run=False)
    assert back["message"].startswith("was drained by alice on 20")
    assert back["message"].endswith(", not by transom: rack move; it is left alone")
