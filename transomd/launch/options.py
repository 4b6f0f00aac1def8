"""Who a launcher is and the times it works by: both come with the command line of the batch script."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

from transom_slurm.nodesets import expand

from transomd.launch.rundir import RunDir
from transomd.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The site's times, in seconds; handed over by the daemon in the batch script."""

    report_s: float = 30.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 15.0
    stall_after_s: float = 600.0
    first_step_after_s: float = 1800.0
    exit_grace_s: float = 5.0
    gate_timeout_s: float = 120.0

    @classmethod
    def from_json(cls, text: str, spec: JobSpec) -> Watch:
        """Read the site's times, and let the job's own win."""
        known = {f.name for f in fields(cls)}
        site = {k: float(v) for k, v in json.loads(text).items() if k in known}
        own = {
            "stall_after_s": spec.watch.stall_after,
            "first_step_after_s": spec.watch.first_step_after,
            "heartbeat_timeout_s": spec.watch.heartbeat_timeout,
        }
        return cls(**{**site, **{k: v for k, v in own.items() if v is not None}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Who this launcher is."""

    run_dir: RunDir
    job_id: int
    attempt: int
    generation: int
    slurm_job_id: int
    nodes: tuple[str, ...]
    host: str


def command_line(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments that the daemon put into the batch script."""
    parser = argparse.ArgumentParser(prog="transom-launcher")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--watch", default="{}")
    parser.add_argument("--nodes", default="", help="the nodes that are left, for a launcher that takes over")
    return parser.parse_args(argv)


def options(args: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Return who this launcher is, from its arguments and from what Slurm says in the environment."""
    return Options(
        run_dir=RunDir(args.run_dir),
        job_id=args.job,
        attempt=args.attempt,
        generation=args.generation,
        slurm_job_id=int(environ["SLURM_JOB_ID"]),
        nodes=tuple(expand(args.nodes or environ["SLURM_JOB_NODELIST"])),
        host=environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0],
    )
