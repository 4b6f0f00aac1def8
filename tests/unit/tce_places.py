"""What tests of the memory tier begin with, as a plugin of pytest: conftest.py would have every test import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tce_keepers import own_place


@pytest.fixture
def directory() -> Iterator[Path]:
    """For the checkpoints of one test, whose keepers may be killed."""
    with own_place(killed=True) as folder:
        yield folder
