"""Fixtures for everybody: an environment without Slurm's variables, and real Slurm sandboxes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from schedule import dealt
from transom_slurm.sandbox import Sandbox
from transom_slurm.sandbox.daemons import find

_SCRUBBED = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "TRANSOM_SANDBOX", "TRANSOM_SOCKET", "TRANSOM_CONFIG")
for _name in [name for name in os.environ if name.startswith(_SCRUBBED)]:
    del os.environ[_name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what goes to the background; the programs under test would inherit it, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

MakeSandbox = Callable[..., Sandbox]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the files out in another order where several workers share them; alone, they are run as asked for."""
    if hasattr(config, "workerinput"):
        place = {file: number for number, file in enumerate(dealt({item.path for item in items}))}
        items.sort(key=lambda item: place[item.path])


def _required() -> bool:
    return os.environ.get("CI") == "true" or os.environ.get("TRANSOM_REQUIRE_CLUSTER") == "1"


def require_cluster() -> None:
    """Skip where no sandbox can run; fail instead where one must (CI=true or TRANSOM_REQUIRE_CLUSTER=1)."""
    if not find("slurmctld"):
        reason = "NO REAL SLURM: slurmctld is not installed, so nothing was tested on a cluster"
    elif os.geteuid() != 0:
        reason = "NO REAL SLURM: not root, so nodes cannot have namespaces and nothing was tested on a cluster"
    else:
        return
    if _required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _factory(stack: list[Sandbox]) -> MakeSandbox:
    def make(nodes: int = 4, **settings: Any) -> Sandbox:
        base = Path(tempfile.mkdtemp(prefix="tsb-"))
        base.chmod(0o755)
        try:
            stack.append(Sandbox.up(nodes, base / "s", **settings))
        except BaseException:
            shutil.rmtree(base)
            raise
        return stack[-1]

    return make


def _end(stack: list[Sandbox]) -> None:
    while stack:
        sandbox = stack.pop()
        Sandbox.clear(sandbox.directory)
        shutil.rmtree(sandbox.directory.parent)


@pytest.fixture(scope="session")
def one_sandbox() -> Iterator[Sandbox]:
    """A real Slurm with 4 nodes for the whole run."""
    require_cluster()
    stack: list[Sandbox] = []
    try:
        yield _factory(stack)(4)
    finally:
        _end(stack)


@pytest.fixture(scope="module")
def sandbox(one_sandbox: Sandbox) -> Sandbox:
    """That Slurm, as new for each module, whatever another one has left; within one ``sandbox.reset()`` does it."""
    one_sandbox.reset()
    return one_sandbox


@pytest.fixture(scope="module")
def make_sandbox() -> Iterator[MakeSandbox]:
    """``make_sandbox(nodes=5, message_timeout=3, ...)``: sandboxes of one's own, ended with the module."""
    require_cluster()
    stack: list[Sandbox] = []
    try:
        yield _factory(stack)
    finally:
        _end(stack)
