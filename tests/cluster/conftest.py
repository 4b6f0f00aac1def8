"""A site for tests of whole jobs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Site


@pytest.fixture
def site(make_sandbox: Any) -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="tjobs-"))
    root.chmod(0o755)
    made = Site(make_sandbox(5, slurmd_timeout=5), root)
    try:
        made.start_daemon()
        yield made
    finally:
        made.stop_daemon()
        made.sandbox.down()
        shutil.rmtree(root, ignore_errors=True)
