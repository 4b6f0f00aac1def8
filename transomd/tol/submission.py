"""What is given to sbatch for one attempt: the script, the call, and the plan of the gate. Pure."""

from __future__ import annotations

import json

from transom_slurm.batch import job_options, render_script
from transom_slurm.types import SubmitRequest, UserIdentity
from transom_sql.records import Attempt, Job

from transomd.settings import Settings
from transomd.spec import JobSpec

WARN_BEFORE_LIMIT_S = 120
"""Seconds before the time limit at which the launcher gets SIGTERM."""


def launcher_argv(
    job_id: int, run_dir: str, attempt: int, slurm_generation: int, daemon_url: str, settings: Settings
) -> list[str]:
    """Return the command line of a launcher."""
    watch = {
        "report_s": settings.watch.report_s,
        "heartbeat_s": settings.watch.heartbeat_s,
        "heartbeat_timeout_s": settings.watch.heartbeat_timeout_s,
        "stall_after_s": settings.watch.stall_after_s,
        "first_step_after_s": settings.watch.first_step_after_s,
        "exit_grace_s": settings.watch.exit_grace_s,
        "gate_timeout_s": settings.health.gate_timeout_s,
    }
    return [
        settings.daemon.python,
        "-m",
        "transomd.launch.launcher",
        f"--run-dir={run_dir}",
        f"--job={job_id}",
        f"--attempt={attempt}",
        f"--generation={slurm_generation}",
        f"--daemon={daemon_url}",
        f"--watch={json.dumps(watch)}",
    ]


def submit_request(
    job: Job, spec: JobSpec, attempt: Attempt, daemon_url: str, settings: Settings, user: UserIdentity | None
) -> SubmitRequest:
    """Return the sbatch call of one attempt."""
    command = launcher_argv(job.id, job.run_dir, attempt.number, 1, daemon_url, settings)
    title = f"transom job {job.id} ({spec.name}), attempt {attempt.number}"
    warn = min(WARN_BEFORE_LIMIT_S, (spec.time_limit_s or 10**9) // 4)
    options = job_options(
        nodes=spec.nodes,
        spares=spec.spares,
        output=f"{job.run_dir}/logs/launcher.log",
        warn_s=warn,
        exclude=attempt.excluded,
        partition=spec.partition,
        account=spec.account,
        qos=spec.qos,
        time_limit=spec.time_limit,
        gpus_per_node=spec.gpus_per_node,
        user_options=spec.sbatch,
    )
    return SubmitRequest(
        script=render_script(command, title=title),
        options=options,
        name=attempt.tag,
        comment=f"transom:{job.id}:{attempt.number}",
        cwd=job.run_dir,
        user=user,
    )


def gate_plan(spec: JobSpec, settings: Settings) -> list[str]:
    """Say what happens between the allocation and the first step, a sentence each."""
    spares = f" and {spec.spares} spare" + ("s" if spec.spares > 1 else "") if spec.spares else ""
    plan = [f"Slurm gives {spec.nodes} nodes{spares}; the launcher holds there and starts one agent a node."]
    if spec.health.probe:
        modes = sorted(f"{check} {mode}" for check, mode in settings.health.modes.items())
        said = f" (modes: {', '.join(modes)}; all others observe)" if modes else " (every check only observes)"
        plan.append(f"Every node is probed over SSH{said}; unfit ones are left out.")
    if spec.health.collective and spec.nodes > 1:
        plan.append(f"An all-reduce runs over the {spec.nodes} chosen nodes as the job's user.")
    plan.append(
        f"{spec.launcher} starts the program: {spec.nodes * spec.tasks_per_node} tasks, {spec.tasks_per_node} a node."
    )
    plan.append(f"If transomd is away, the gate opens by itself after {settings.health.gate_timeout_s:.0f} s.")
    return plan
