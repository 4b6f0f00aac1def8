"""A power cut at any point of saves through DCP, on a disk that loses, tears and reorders what was not synced."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dcp_cuts import found

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _storage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_MEMORY", "off")


@pytest.mark.parametrize(("seed", "shares"), [(1, (1.0,)), (2, (0.5,)), (3, (0.1,))])
def test_after_a_power_cut_what_dcp_saved_is_whole_or_not_chosen(
    seed: int, shares: tuple[float, ...], tmp_path: Path
) -> None:
    """Two ranks, in an order that the dice choose; and none that ``dcp.save`` returned from is lost."""
    count, wrong = found(seed, 2, shares, tmp_path / "cuts")
    assert not wrong
    assert count > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_the_same_with_three_ranks_and_everything_that_may_be_lost(seed: int, tmp_path: Path) -> None:
    count, wrong = found(seed, 3, (1.0, 0.0, 0.5, 0.1), tmp_path / "cuts")
    assert not wrong
    assert count > 150
