"""Which Python has a pyslurm for the Slurm here: ``$TRANSOM_PYSLURM_PYTHON``, else the one that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
from transom_slurm.pyslurm_client import release
from transom_slurm.sandbox.daemons import find

_HOW = (
    "docs/slurm.md says how to install it; TRANSOM_PYSLURM_PYTHON names the interpreter that has it; "
    "TRANSOM_REQUIRE_PYSLURM=1 makes this a failure"
)
_FIND = "import importlib.metadata; print(importlib.metadata.version('pyslurm'))"


@cache
def _missing() -> str:
    """Why pyslurm cannot be tested, or an empty text. Importing it needs a slurm.conf, so its files are asked."""
    found = subprocess.run([interpreter(), "-I", "-c", _FIND], capture_output=True, text=True, timeout=60)
    if found.returncode:
        return f"{interpreter()} has no pyslurm"
    if not (slurmctld := find("slurmctld")):
        return "slurmctld is not installed"
    said = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=60).stdout.split()[-1]
    if release(said) != release(found.stdout):
        return f"pyslurm {found.stdout.strip()} was built for another Slurm than {said}"
    return ""


def interpreter() -> str:
    """The interpreter to run the worker with."""
    return os.environ.get("TRANSOM_PYSLURM_PYTHON") or sys.executable


def require_pyslurm() -> str:
    """The interpreter; skips loudly where pyslurm is missing, and fails where it must not be."""
    if missing := _missing():
        reason = f"NO PYSLURM: {missing}, so the pyslurm client was not tested; {_HOW}"
        if os.environ.get("TRANSOM_REQUIRE_PYSLURM") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return interpreter()
