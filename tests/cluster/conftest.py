"""A site for tests of whole jobs, and the ordinary users of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from jobs import Site, site_on
from people import Person, people


@pytest.fixture
def site(make_sandbox: Any, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A sandbox of its own for one test, with a transomd that answers; see ``with_settings``."""
    with site_on(make_sandbox(5), Site) as made:
        made.set(**getattr(request, "param", {}))
        made.start_daemon()
        yield made


@pytest.fixture(scope="module")
def persons() -> Iterator[list[Person]]:
    """Two ordinary users."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make accounts")
    with people() as made:
        yield made
