"""Nodes that the tests of health reach over a real sshd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from health_sshd import Sshd, open_directory

from transomd.health.ssh import SshPool


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """Three nodes, ``n1`` to ``n3``. A test that stops one starts it again."""
    with Sshd(tmp_path_factory.mktemp("sshd"), nodes=3) as running:
        yield running


@pytest.fixture
async def pool(sshd: Sshd) -> AsyncIterator[SshPool]:
    """Connections to these nodes."""
    async with SshPool(sshd.settings()) as opened:
        yield opened


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user may write to."""
    with open_directory() as path:
        yield path
