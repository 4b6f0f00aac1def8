"""What the daemon does, as a program that runs in a sandbox's hub: ``health_hub.py REQUEST``, both ways JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from transomd.health.checker import ProbeOptions, probe
from transomd.health.collective import CollectiveOptions, all_reduce
from transomd.health.fence import fence_all
from transomd.health.profile import Profile
from transomd.health.ssh import SshPool, SshSettings


async def do_probe(pool: SshPool, request: dict[str, Any]) -> Any:
    """Per node: whether it was reached, the outcome, the error, and each check's outcome, evidence and signature."""
    options = ProbeOptions(**request["options"])
    reports = await probe(pool, request["nodes"], Profile(**request["profile"]), options)
    return {
        node: {
            "reached": report.reached,
            "outcome": report.outcome,
            "error": report.error,
            "checks": {result.check: result.to_json() for result in report.results},
        }
        for node, report in reports.items()
    }


async def do_reduce(pool: SshPool, request: dict[str, Any]) -> Any:
    """The report of one all-reduce."""
    report = await all_reduce(pool, request["nodes"], CollectiveOptions(**request["options"]))
    return {name: getattr(report, name) for name in ("outcome", "backend", "bus_gbps", "seconds", "error", "output")}


async def do_fence(pool: SshPool, request: dict[str, Any]) -> Any:
    """Per node: whether it is clean, what was killed, why it could not be reached."""
    reports = await fence_all(pool, request["nodes"], request["job"], request["epoch"], timeout=20.0)
    return {node: {"clean": r.clean, "killed": r.killed, "failure": r.failure} for node, r in reports.items()}


async def main() -> None:
    """Do what the request's ``do`` says and print the answer."""
    request = json.loads(sys.argv[1])
    settings = SshSettings(
        known_hosts=Path(request["known_hosts"]),
        config=Path(request["config"]),
        client_keys=(Path(request["key"]),),
        user="root",
        connect_timeout=10.0,
    )
    async with SshPool(settings) as pool:
        print(
            json.dumps(await {"probe": do_probe, "reduce": do_reduce, "fence": do_fence}[request["do"]](pool, request))
        )


if __name__ == "__main__":
    asyncio.run(main())
