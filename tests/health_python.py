"""Which Python with torch the ranks of the collective check can be run with, and as whom."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest


@cache
def interpreter() -> tuple[str | None, str, dict[str, str]]:
    """User, interpreter and environment.

    Another user, with the system's Python and our packages, if that works; else root with this interpreter, which
    may lie in root's home.
    """
    packages = {"PYTHONPATH": str(Path(pytest.__file__).parent.parent)}
    drop = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    argv = [*drop, "/usr/bin/python3", "-c", "import torch"]
    if subprocess.run(argv, env=packages, cwd="/", stderr=subprocess.DEVNULL).returncode == 0:
        return "nobody", "/usr/bin/python3", packages
    return None, sys.executable, {}
