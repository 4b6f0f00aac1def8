"""A drain by hand of a node that is drained already says by whom, since when and why."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tol_sites import hands, started
from tol_world import SimWorld


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        await made.run(5)
        yield made


@pytest.mark.parametrize("dry_run", [False, True])
async def test_transom_has_drained_it_already(world: SimWorld, dry_run: bool) -> None:
    (first,) = await hands(world).drain(["n1"], "transom[manual] ann: fan", dry_run=False)
    assert (first["done"], first["message"]) == (True, "drained")
    (again,) = await hands(world).drain(["n1"], "transom[manual] bob: rack", dry_run=dry_run)
    assert again["done"]
    assert again["message"].startswith("drained already, by transom on 20")
    assert again["message"].endswith(": transom[manual] ann: fan")
    assert world.drained() == ["n1"]


async def test_a_person_has_drained_it(world: SimWorld) -> None:
    world.slurm.drain_by_person("n2", "rack move")
    (told,) = await hands(world).drain(["n2"], "transom[manual] ann: fan", dry_run=False)
    assert not told["done"]
    assert told["message"].startswith("alice drained it on 20")
    assert told["message"].endswith(": rack move; left as it is")
    (back,) = await hands(world).undrain(["n2"], "ann", dry_run=False)
    assert back["message"].startswith("was drained by alice on 20")
    assert back["message"].endswith(", not by transom: rack move; it is left alone")
