"""Send one of our self-contained scripts to a node's own Python and read its JSON answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transomd.health.scripts import source
from transomd.health.session import SshResult
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import SshFailure

PYTHON = "/usr/bin/python3"
"""The node's own interpreter, 3.6 or later; never a user's."""


async def run_script(
    pool: SshPool, node: str, script: Path, request: str, *, timeout: float, python: str = PYTHON
) -> tuple[Mapping[str, Any], SshResult]:
    """Run a script with a JSON request; its answer and how the command went.

    Raises SshFailure, of kind ``other`` when the script failed or its last line is no JSON object. The interpreter runs
    isolated: neither its environment nor any directory of a user's is looked at.
    """
    result = await pool.run(node, [python, "-I", "-S", "-", request], stdin=source(script), timeout=timeout)
    lines = result.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines and not result.truncated else None
    except ValueError:
        answer = None
    if result.rc or not isinstance(answer, dict):
        last = (result.stderr.strip().splitlines() or ["no output"])[-1][:300]
        cause = f"{script.name} exited with {result.rc} and no readable answer: {last}"
        raise SshFailure(node, "other", cause, hint=f"ssh {node} {python} --version")
    return answer, result
