"""The self-contained programs that run on nodes, as files; importing this needs no SSH."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from transomd.health.profile import Profile

PROBE = Path(__file__).with_name("probe.py")
END_JOB = Path(__file__).with_name("endjob.py")
ALL_REDUCE = Path(__file__).with_name("allreduce.py")


@cache
def source(path: Path) -> bytes:
    """A script's text, read once."""
    return path.read_bytes()


def local_probe(profile: Profile, deadline: float = 8.0, python: str = sys.executable) -> list[str]:
    """The command by which an agent probes its own node, as whoever it is; its output is the facts for the judge."""
    return [python, "-I", "-S", str(PROBE), profile.request(deadline)]
